"""Kernels of the model beside attention: norms, activation, rotation and store, decode inputs."""

import runpy
import sys

import pytest
import torch
from kernel_checks import (
    check_decode_inputs,
    check_keep_tokens,
    check_linear_of_any_number_of_rows,
    check_post_tokens,
    check_rms_norm,
    check_silu_and_mul,
    check_small_linear,
    check_store,
)
from paged_rows import DEVICE, PagedRows, Shape, assert_heads_close

from nanovllm.kernels import _triton, small_linear
from nanovllm.kernels.paged_decode import paged_decode
from nanovllm.kernels.small_linear import HEAD, NARROW, small_config
from nanovllm.kernels.store_kvcache import store_kvcache

DTYPES = [torch.float32, torch.float16]


@pytest.mark.spec("MOD-3", "MOD-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [48, 1024])
def test_rms_norm(n: int, dtype: torch.dtype) -> None:
    check_rms_norm(5, n, dtype)


@pytest.mark.spec("MOD-3")
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    check_silu_and_mul(3, 1100, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(33, 100), (6, 2300), (7, 1024)], ids=str)
@pytest.mark.parametrize("as_if", [NARROW, NARROW + 1, HEAD])
def test_small_linear(
    as_if: int, sizes: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tiles of `as_if` outputs."""
    monkeypatch.setattr(small_linear, "small_config", lambda _: small_config(as_if))
    check_small_linear(*sizes, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_any_number_of_rows(dtype: torch.dtype) -> None:
    check_linear_of_any_number_of_rows(dtype)


@pytest.mark.spec("KV-1", "KV-2", "MOD-3", "MOD-4", "MOD-7")
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 2, 64, 3, torch.float32),
        Shape(9, 3, 96, 16, torch.float16),
        Shape(10, 10, 128, 1, torch.float32),
        Shape(2, 1, 256, 5, torch.float16),
    ],
    ids=str,
)
def test_store(shape: Shape) -> None:
    check_store(shape, 7)


@pytest.mark.spec("KV-1", "KV-2")
@pytest.mark.parametrize("batch", [1, 130])
@pytest.mark.parametrize("block_size", [1, 16, 300])
def test_decode_inputs(batch: int, block_size: int) -> None:
    check_decode_inputs(batch, block_size)


@pytest.mark.spec("SMP-5")
@pytest.mark.parametrize("batch", [1, 130])
def test_keep_tokens(batch: int) -> None:
    check_keep_tokens(batch)


@pytest.mark.spec("SMP-5")
@pytest.mark.parametrize("batch", [2, 130])
def test_post_tokens(batch: int) -> None:
    check_post_tokens(batch, pinned=False)


@pytest.mark.spec("KV-6")
def test_offsets_beyond_two_to_the_31() -> None:
    """Only the pages that are touched are ever there."""
    shape = Shape(2, 2, 128, 16, torch.float16)
    num_blocks = 2**31 // (16 * 2 * 128) + 8
    k_cache, v_cache = (
        torch.empty(num_blocks, 16, 2, 128, dtype=torch.float16, device=DEVICE) for _ in range(2)
    )
    rows = PagedRows(shape, [20])
    blocks = torch.tensor([num_blocks - 1, num_blocks - 3], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(20, device=DEVICE)
    slots = blocks.long()[positions // 16] * 16 + positions % 16
    store_kvcache(rows.keys[0], rows.values[0], k_cache, v_cache, slots)
    q = shape.randn(1, 2)
    first, length = torch.tensor([[0], [20]], dtype=torch.int32, device=DEVICE)
    out = paged_decode(q, k_cache, v_cache, blocks[None], first, length, shape.scale)
    assert_heads_close(out, rows.expected(0, q))


def test_without_triton_a_launch_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    absent = runpy.run_path(_triton.__file__)

    def some_kernel() -> None: ...

    with pytest.raises(ImportError, match=r"some_kernel needs Triton.*torch"):
        absent["jit"](some_kernel)[(1,)]()
