"""Times the Triton kernels on this GPU, in the shapes of Qwen3-0.6B, and tries other tiles.

    python scripts/bench_kernels.py            # each kernel beside a copy, torch and flash-attn
    python scripts/bench_kernels.py --sweep    # tiles, warps, stages and splits of attention

Calls are captured in a CUDA graph and go round over inputs that do not fit into the L2 cache
together; a time is the median of several replays. TB/s counts every byte that has to move once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from kernel_sweep import sweep_decode, sweep_prefill, sweep_splits
from kernel_timing import (
    BEYOND_L2,
    DECODE_ROWS,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    POOL_TOKENS,
    PREFILL_ROWS,
    Attention,
    Call,
    attention_tflop,
    has_flash_attn,
    microseconds,
    randn,
)

from nanovllm.bench.roofline import measure_rates
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.sample import sample
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.small_linear import small_linear
from nanovllm.kernels.store_kvcache import store_kvcache

HIDDEN, MLP, VOCAB = 1024, 3072, 151_936
Make = Callable[[], Call]


def line(name: str, us: float, num_bytes: float, copy: float, *notes: str) -> None:
    speed = num_bytes / us / 1e6
    print(f"{name:<42}{us:9.1f} us {speed:6.2f} TB/s {speed / copy:6.1%}  {', '.join(notes)}")


def bench_decode(pool: torch.Tensor, copy: float) -> None:
    """FlashAttention has no fp8 cache, and pages of 256 only."""
    dtype = "fp8 " if pool.itemsize == 1 else ""
    for name, lengths in DECODE_ROWS.items():
        for page in (16, 32, 256):
            case = Attention(pool, page, lengths)
            us = microseconds(case.decode())
            notes = []
            if page == 256 and not dtype and has_flash_attn():
                flash = microseconds(case.flash_decode())
                notes.append(f"FA2 {flash:.1f} us, {case.num_bytes / flash / 1e6:.2f} TB/s")
            line(f"paged_decode {dtype}{name}, page {page}", us, case.num_bytes, copy, *notes)


def bench_prefill(pool: torch.Tensor) -> None:
    for name, rows in PREFILL_ROWS.items():
        counts, lengths = zip(*rows, strict=True)
        tflop = attention_tflop(rows)
        for page in (16, 256):
            case = Attention(pool, page, lengths)
            us = microseconds(case.prefill(counts))
            text = f"{us:9.1f} us {tflop / us * 1e6:6.1f} TFLOP/s"
            if page == 256 and has_flash_attn():
                flash = microseconds(case.flash_prefill(counts))
                text += f"  FA2 {flash:.1f} us, {tflop / flash * 1e6:.1f} TFLOP/s"
            print(f"{f'paged_prefill {name}, page {page}':<42}{text}")


def rotate(make: Make, num_bytes: float) -> list[Call]:
    """As many calls with inputs of their own as are needed to move more than the L2 cache holds."""
    return [make() for _ in range(min(max(2, int(BEYOND_L2 // num_bytes) + 1), 512))]


class Case(NamedTuple):
    """A kernel and torch's way, each made with inputs of its own; values that move per token."""

    name: str
    values: int
    make: Make
    peer: Make


def stream_cases(batch: int) -> Iterator[Case]:
    """What works on the residual stream and in the MLP."""
    weight = randn(HIDDEN)
    torch_norm = partial(F.rms_norm, normalized_shape=(HIDDEN,), weight=weight, eps=1e-6)

    def torch_add_norm() -> Call:
        x, y = randn(2, batch, HIDDEN)
        return lambda: torch_norm(x + y)

    def torch_silu() -> Call:
        gate, up = randn(batch, 2 * MLP).chunk(2, -1)
        return lambda: F.silu(gate) * up

    yield Case(
        "rms_norm",
        2 * HIDDEN,
        lambda: partial(rms_norm, randn(batch, HIDDEN), weight, 1e-6),
        lambda: partial(torch_norm, randn(batch, HIDDEN)),
    )
    yield Case(
        "add_rms_norm",
        4 * HIDDEN,
        lambda: partial(add_rms_norm, *randn(2, batch, HIDDEN), weight, 1e-6),
        torch_add_norm,
    )
    yield Case(
        "silu_and_mul",
        3 * MLP,
        lambda: partial(silu_and_mul, randn(batch, 2 * MLP)),
        torch_silu,
    )


def head_cases(batch: int, pool: torch.Tensor) -> Iterator[Case]:
    """What happens between the projection and attention."""
    caches = pool.view(2, -1, 16, KV_HEADS, DIM)
    weight, width = randn(DIM), HEADS + 2 * KV_HEADS
    cos_sin = randn(4096, 2, DIM // 2, dtype=torch.float32)
    positions = torch.randint(4096, (batch,), device=DEVICE)
    slots = torch.randperm(POOL_TOKENS, device=DEVICE)[:batch]
    rest = weight, weight, 1e-6, cos_sin, positions, slots, *caches

    def torch_store() -> Call:
        heads = randn(2, batch, KV_HEADS, DIM)

        def store() -> None:
            for cache, values in zip(caches, heads, strict=True):
                cache.view(-1, KV_HEADS, DIM)[slots] = values

        return store

    yield Case(
        "qk_norm_rope_store (torch: norm alone)",
        2 * width * DIM,
        lambda: partial(qk_norm_rope_store, randn(batch, width * DIM), *rest),
        lambda: partial(F.rms_norm, randn(batch, width, DIM), (DIM,), weight, 1e-6),
    )
    yield Case(
        "store_kvcache",
        4 * KV_HEADS * DIM,
        lambda: partial(store_kvcache, *randn(2, batch, KV_HEADS, DIM), *caches, slots),
        torch_store,
    )


def product_cases() -> Iterator[Case]:
    """Those of one row, which read each weight once."""
    for name, inputs, outputs in (
        ("qkv", HIDDEN, (HEADS + 2 * KV_HEADS) * DIM),
        ("o", HEADS * DIM, HIDDEN),
        ("gate and up", HIDDEN, 2 * MLP),
        ("down", MLP, HIDDEN),
        ("head", HIDDEN, VOCAB),
    ):

        def make(
            product: Callable[..., object], inputs: int = inputs, outputs: int = outputs
        ) -> Call:
            return partial(product, randn(1, inputs), randn(outputs, inputs))

        yield Case(
            f"small_linear, {name}",
            inputs * outputs,
            partial(make, small_linear),
            partial(make, F.linear),
        )


def sample_case(batch: int) -> Case:
    seats = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    rows = (
        torch.full((batch,), 0.6, device=DEVICE),
        torch.randint(2**62, (batch,), device=DEVICE),
        seats,
        seats + 1000,
        torch.full((batch,), -torch.inf, device=DEVICE),
        torch.full_like(seats, VOCAB),
        torch.empty(batch, dtype=torch.int64, device=DEVICE),
    )
    return Case(
        "sample (torch: argmax alone)",
        VOCAB,
        lambda: partial(sample, randn(batch, VOCAB), *rows),
        lambda: partial(torch.argmax, randn(batch, VOCAB), dim=-1),
    )


def bench_small(pool: torch.Tensor, copy: float, batch: int) -> None:
    """The kernels beside attention, for a batch of this many tokens."""
    cases = [*stream_cases(batch), *head_cases(batch, pool)]
    if batch <= 256:
        cases.append(sample_case(batch))
    if batch == 1:
        cases += product_cases()
    for case in cases:
        num_bytes = 2.0 * case.values * batch
        us, peer = (microseconds(rotate(make, num_bytes)) for make in (case.make, case.peer))
        line(f"{case.name} x {batch}", us, num_bytes, copy, f"torch {peer:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try tiles instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    pool = randn(2, POOL_TOKENS, KV_HEADS, DIM)
    if options.sweep:
        sweep_decode(pool)
        sweep_splits(pool)
        sweep_prefill(pool)
        return
    # Not in a graph, where copies are slower nodes of another kind.
    copy = measure_rates(torch.device(DEVICE), torch.bfloat16).copy / 1e12
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy: {copy:.2f} TB/s")
    bench_decode(pool, copy)
    bench_decode(pool.to(torch.float8_e4m3fn), copy)
    bench_prefill(pool)
    for batch in (1, 8, 256, 16_384):
        bench_small(pool, copy, batch)


if __name__ == "__main__":
    main()
