"""Attention over the paged cache by Triton, against dense attention in fp64."""

import pytest
import torch
from paged_rows import DEVICE, PagedRows, Shape, check_decode, check_prefill

from nanovllm.kernels.paged_decode import DecodeConfig, paged_decode, paged_decode_reference
from nanovllm.kernels.paged_prefill import PrefillConfig, paged_prefill, paged_prefill_reference

FP32, FP16 = torch.float32, torch.float16


@pytest.mark.spec("KV-1", "KV-2", "KV-3", "KV-4", "KV-8")
@pytest.mark.parametrize(
    ("shape", "lengths", "num_splits"),
    [
        (Shape(4, 2, 64, 16, FP32), [1, 300, 128], 3),
        (Shape(4, 2, 64, 16, FP16), [1, 300, 64], 1),
        (Shape(3, 1, 96, 7, FP16), [63, 65], 1),
        (Shape(8, 1, 128, 256, FP16), [257, 1], 2),
        (Shape(3, 3, 64, 1, FP32), [33], 1),
        (Shape(2, 1, 256, 300, FP32), [299], 1),
    ],
    ids=str,
)
def test_decode(shape: Shape, lengths: list[int], num_splits: int) -> None:
    check_decode(shape, lengths, num_splits)


@pytest.mark.spec("KV-1", "KV-3", "KV-4", "KV-5", "KV-7", "KV-8")
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (Shape(4, 2, 64, 16, FP32), [(1, 1), (7, 300), (40, 40), (1, 65)]),
        (Shape(3, 1, 96, 7, FP16), [(1, 64), (130, 150)]),
        (Shape(8, 1, 128, 256, FP16), [(33, 290)]),
        (Shape(2, 2, 64, 1, FP32), [(1, 5), (1, 33), (1, 32)]),
        (Shape(2, 1, 256, 300, FP32), [(20, 299)]),
    ],
    ids=str,
)
def test_prefill(shape: Shape, rows: list[tuple[int, int]]) -> None:
    check_prefill(shape, rows)


@pytest.mark.spec("KV-4", "MOD-3")
def test_references_and_other_tiles_agree() -> None:
    shape = Shape(4, 2, 64, 16, FP32)
    rows = PagedRows(shape, [70, 20])
    # References take caches as the engine has them, contiguous.
    caches = rows.k_cache.contiguous(), rows.v_cache.contiguous()
    q = shape.randn(2, 4)
    before = q.clone()
    lengths = torch.tensor([70, 20], dtype=torch.int32, device=DEVICE)
    args = (q, *caches, rows.block_tables, rows.table_rows)
    expected = paged_decode_reference(*args, lengths, shape.scale)
    out = paged_decode(*args, lengths, shape.scale, 2, config=DecodeConfig(16, 4, 1))
    torch.testing.assert_close(out, expected)
    bounds = torch.arange(3, dtype=torch.int32, device=DEVICE)
    again = paged_prefill_reference(*args, bounds, lengths, shape.scale)
    torch.testing.assert_close(again, expected)
    out = paged_prefill(*args, bounds, lengths, shape.scale, PrefillConfig(16, 16, 4, 1))
    torch.testing.assert_close(out, expected)
    assert torch.equal(q, before)
