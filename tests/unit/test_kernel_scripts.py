"""The scripts that time kernels call them as they are."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
POOL_TOKENS = 512
SHAPE = {"HEADS": 4, "KV_HEADS": 2, "DIM": 64}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """`kernel_timing` and `bench_kernels`, on the device of the tests and in small."""
    if torch.cuda.is_available():
        pytest.skip("there the scripts themselves can be run")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("kernel_timing", "kernel_sweep", "bench_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import bench_kernels
    import kernel_timing

    for module in (kernel_timing, bench_kernels):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "POOL_TOKENS", POOL_TOKENS)
        for name, value in SHAPE.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kernel_timing, "BEYOND_L2", 1)
    monkeypatch.setattr(bench_kernels, "VOCAB", 300)
    return kernel_timing, bench_kernels


def test_attention(scripts: tuple[ModuleType, ModuleType]) -> None:
    timing, _ = scripts
    pool = timing.randn(2, POOL_TOKENS, timing.KV_HEADS, timing.DIM)
    case = timing.Attention(pool, 16, [20, 1])
    fp8 = timing.Attention(pool.to(torch.float8_e4m3fn), 16, [20, 1])
    assert 2 * fp8.num_bytes == case.num_bytes
    calls = case.decode()[0], case.decode(3)[0], case.prefill([2, 1])[0], fp8.decode()[0]
    for call in calls:
        assert call().shape[1:] == (timing.HEADS, timing.DIM)


def test_the_kernels_beside_it(scripts: tuple[ModuleType, ModuleType]) -> None:
    timing, bench = scripts
    pool = timing.randn(2, POOL_TOKENS, timing.KV_HEADS, timing.DIM)
    cases = [*bench.stream_cases(2), *bench.head_cases(2, pool), bench.sample_case(2)]
    cases += list(bench.product_cases())[-1:]
    for case in cases:
        case.make()()
        case.peer()()
    assert len(cases) == 7


def test_a_decode_step_with_filters(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "bench_filters", raising=False)
    import bench_filters

    monkeypatch.setattr(bench_filters, "PROMPT_LEN", 4)
    monkeypatch.setattr(bench_filters, "STEPS", 2)
    monkeypatch.setattr(bench_filters, "BATCHES", (1, 3))
    monkeypatch.setattr(sys, "argv", ["bench_filters.py", "--model", str(checkpoint)])
    bench_filters.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*bench_filters.FILTERS, "batch 1", "batch 3"))
