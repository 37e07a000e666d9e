"""What `bench_kernels.py` measures attention on, in the shapes of Qwen3-0.6B, and its clock."""

from __future__ import annotations

import importlib.util
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from nanovllm.kernels.paged_decode import DecodeConfig, paged_decode
from nanovllm.kernels.paged_prefill import PrefillConfig, paged_prefill

DEVICE, DTYPE = "cuda", torch.bfloat16
HEADS, KV_HEADS, DIM = 16, 8, 128
SCALE = DIM**-0.5
POOL_TOKENS = 2**20
"""Tokens of the cache that all calls share: 4 GiB."""
BEYOND_L2 = 256 * 2**20
REPLAYS, MIN_CALLS = 9, 20


def longest_first(count: int, shortest: int, longest: int) -> list[int]:
    """Contexts as the engine orders them."""
    return sorted(random.Random(0).choices(range(shortest, longest + 1), k=count), reverse=True)


DECODE_ROWS = {
    "256 x 843": [843] * 256,
    "256 x 300-1900": longest_first(256, 300, 1900),
    "128 x 500-1500": longest_first(128, 500, 1500),
    "64 x 1500": [1500] * 64,
    "32 x 1200-1900": longest_first(32, 1200, 1900),
    "16 x 1500-1900": longest_first(16, 1500, 1900),
    "8 x 800": [800] * 8,
    "1 x 800": [800],
}
PREFILL_ROWS = {  # (tokens, context)
    "16 x 1024": [(1024, 1024)] * 16,
    "1 x 16384": [(16_384, 16_384)],
    "28 x 560": [(560, 560)] * 28,
    "8 x 256 behind 1024": [(256, 1280)] * 8,
    "8 x 1024, 128 of 1": [(1024, 1024)] * 8 + [(1, 800)] * 128,
}
Call = Callable[[], object]


def microseconds(calls: Sequence[Call]) -> float:
    """Of one call, the calls following each other in a graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = -(-MIN_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in list(calls) * rounds:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / (rounds * len(calls))


def randn(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype, device=DEVICE)


def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@dataclass(frozen=True)
class Attention:
    """Sequences whose blocks lie anywhere in one big cache."""

    pool: torch.Tensor
    block_size: int
    lengths: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return 2 * self.pool.itemsize * KV_HEADS * DIM * sum(self.lengths)

    @cached_property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache, v_cache = self.pool.view(2, -1, self.block_size, KV_HEADS, DIM)
        return k_cache, v_cache

    def tables(self) -> Iterator[torch.Tensor]:
        """Block tables, no two of which share a block; at least two."""
        width = -(-max(self.lengths) // self.block_size)
        needed = len(self.lengths) * width
        blocks = torch.randperm(len(self.caches[0]), device=DEVICE).int()
        assert 2 * needed <= len(blocks), f"{needed} blocks twice in a pool of {len(blocks)}"
        most = min(len(blocks) // needed, max(2, int(BEYOND_L2 // self.num_bytes) + 1))
        for part in blocks.split(needed)[:most]:
            yield part.view(len(self.lengths), width)

    def decode(
        self, num_splits: int | None = None, config: DecodeConfig | None = None
    ) -> list[Call]:
        rows, lengths = ints(range(len(self.lengths))), ints(self.lengths)
        q = randn(len(self.lengths), HEADS, DIM)
        arrivals = torch.zeros(len(q) * KV_HEADS, dtype=torch.int32, device=DEVICE)
        options = {"num_splits": num_splits, "arrivals": arrivals, "config": config}
        return [
            partial(paged_decode, q, *self.caches, t, rows, lengths, SCALE, **options)
            for t in self.tables()
        ]

    def flash_decode(self) -> list[Call]:
        from flash_attn import flash_attn_with_kvcache

        q, lengths = randn(len(self.lengths), 1, HEADS, DIM), ints(self.lengths)
        options = {"cache_seqlens": lengths, "softmax_scale": SCALE, "causal": True}
        return [
            partial(flash_attn_with_kvcache, q, *self.caches, block_table=t, **options)
            for t in self.tables()
        ]

    def prefill(self, counts: Sequence[int], config: PrefillConfig | None = None) -> list[Call]:
        rows, lengths = ints(range(len(counts))), ints(self.lengths)
        q, bounds = randn(sum(counts), HEADS, DIM), ints([0, *counts]).cumsum(0).int()
        ends = bounds, lengths, SCALE, config
        return [partial(paged_prefill, q, *self.caches, t, rows, *ends) for t in self.tables()]

    def flash_prefill(self, counts: Sequence[int]) -> list[Call]:
        from flash_attn import flash_attn_varlen_func

        q, bounds = randn(sum(counts), HEADS, DIM), ints([0, *counts]).cumsum(0).int()
        ends = ints([0, *self.lengths]).cumsum(0).int()
        sizes = bounds, ends, max(counts), max(self.lengths)
        options = {"softmax_scale": SCALE, "causal": True}
        return [
            partial(flash_attn_varlen_func, q, *self.caches, *sizes, block_table=t, **options)
            for t in self.tables()
        ]


def attention_tflop(rows: Sequence[tuple[int, int]]) -> float:
    """Of rows of (tokens, context)."""
    pairs = sum(count * (2 * context - count + 1) / 2 for count, context in rows)
    return 4 * HEADS * DIM * pairs / 1e12


def has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None
