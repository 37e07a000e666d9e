"""Checks of the attention and store kernels, for the interpreter and for a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanovllm.kernels.paged_decode import paged_decode
from nanovllm.kernels.paged_prefill import paged_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of a head's output, relative to its norm."""


@dataclass(frozen=True)
class Shape:
    """Heads, and a cache for them whose strides are no powers of two."""

    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    """Of the cache, if it is another."""

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, self.head_dim, dtype=self.dtype, device=DEVICE)

    def caches(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values full of NaN, with room for a slot and a head more than there are."""
        size = (2, num_blocks, self.block_size + 1, self.kv_heads + 1, self.head_dim)
        nans = torch.full(size, torch.nan, dtype=self.dtype, device=DEVICE)
        k_cache, v_cache = nans.to(self.kv_dtype or self.dtype)
        return k_cache[:, :-1, :-1], v_cache[:, :-1, :-1]


class PagedRows:
    """Sequences in blocks anywhere in a cache; slots that are nobody's hold NaN."""

    def __init__(self, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, self.lengths = shape, lengths
        size = shape.block_size
        width = -(-max(lengths) // size)
        free = torch.randperm(sum(-(-n // size) for n in lengths) + 3).tolist()
        self.k_cache, self.v_cache = shape.caches(len(free))
        self.keys = [self._storable(n) for n in lengths]
        self.values = [self._storable(n) for n in lengths]
        # One row of the tables is nobody's, and they are in another order than the sequences.
        order = torch.randperm(len(lengths) + 1)[: len(lengths)]
        tables = torch.full((len(lengths) + 1, width), -(2**31), dtype=torch.int32)
        for row, n, k, v in zip(order, lengths, self.keys, self.values, strict=True):
            blocks = torch.tensor([free.pop() for _ in range(-(-n // size))], dtype=torch.int32)
            tables[row, : len(blocks)] = blocks
            positions = torch.arange(n)
            where = blocks.long()[positions // size].to(DEVICE), (positions % size).to(DEVICE)
            self.k_cache[where] = k.to(self.k_cache.dtype)
            self.v_cache[where] = v.to(self.v_cache.dtype)
        self.block_tables = tables.to(DEVICE)
        self.table_rows = order.int().to(DEVICE)

    def _storable(self, length: int) -> torch.Tensor:
        """Values that the cache's dtype has."""
        x = self.shape.randn(length, self.shape.kv_heads)
        return x.to(self.k_cache.dtype).to(x.dtype)

    def expected(self, sequence: int, q: torch.Tensor) -> torch.Tensor:
        """Dense attention in fp64 of q [C, H, D], the last tokens of a sequence."""
        return dense_attention(q, self.keys[sequence], self.values[sequence], self.shape.scale)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """fp64 attention of q [C, H, D], the last C of the positions of k and v [L, KV, D]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    count, length = q.shape[1], k.shape[1]
    seen = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def assert_heads_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Every head of every token [..., D] is as its dtype allows; NaN is not."""
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    worst = error.nan_to_num(torch.inf).max().item()
    assert worst < TOLERANCE[out.dtype], f"relative error {worst:.2e}"


def check_decode(shape: Shape, lengths: Sequence[int], num_splits: int, seed: int = 0) -> None:
    """A batch with padding at its end and in its midst."""
    rows = PagedRows(shape, lengths, seed)
    q = 2 * shape.randn(len(lengths), shape.num_heads)
    at = torch.tensor([i for i in range(len(lengths) + 1) if i != 1], device=DEVICE)
    batch = len(lengths) + 2
    padded = shape.randn(batch, shape.num_heads)
    table_rows = torch.full((batch,), -1, dtype=torch.int32, device=DEVICE)
    context_lens = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    padded[at], table_rows[at] = q, rows.table_rows
    context_lens[at] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    arrivals = torch.zeros(batch * shape.kv_heads, dtype=torch.int32, device=DEVICE)
    tables = rows.block_tables, table_rows, context_lens
    args = padded, rows.k_cache, rows.v_cache, *tables, shape.scale, num_splits, arrivals
    out = paged_decode(*args)
    assert (out[[1, -1]] == 0).all(), "padding is not zero"
    expected = [rows.expected(i, q[i : i + 1]) for i in range(len(lengths))]
    assert_heads_close(out[at], torch.cat(expected))
    assert not arrivals.any(), "the next call would take a split for the last one"
    assert paged_decode(*args).equal(out), "another order of the splits, another result"


def check_prefill(shape: Shape, rows_: Sequence[tuple[int, int]], seed: int = 0) -> None:
    """Rows of (tokens, context)."""
    counts, lengths = zip(*rows_, strict=True)
    rows = PagedRows(shape, lengths, seed)
    q = 2 * shape.randn(sum(counts), shape.num_heads)
    cu_seqlens_q = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    out = paged_prefill(
        q,
        rows.k_cache,
        rows.v_cache,
        rows.block_tables,
        rows.table_rows,
        cu_seqlens_q,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        shape.scale,
    )
    expected = [rows.expected(i, part) for i, part in enumerate(q.split(counts))]
    assert_heads_close(out, torch.cat(expected))
