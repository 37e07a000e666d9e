"""Paged decode attention: one query token per sequence (KV-3..6).

Bound by the bytes of the cache, so each is read once: a program serves all query heads of one KV
head. Few sequences leave most of the GPU idle; then the context is split between programs, see
`combine_splits`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._triton import LOG2_E, jit, next_power_of_2, tl
from nanovllm.kernels.combine_splits import combine_splits
from nanovllm.kernels.early_launch import wait_for_inputs
from nanovllm.kernels.paged_attention import attend_row
from nanovllm.kernels.paged_tiles import attend_tiles

MAX_SPLITS = 16


class DecodeConfig(NamedTuple):
    """How a program works: positions of a tile, warps, depth of the software pipeline; and how many
    programs fill a large GPU: a context is split if two for each find room.
    """

    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int = 512


def decode_config(
    batch: int, num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, bits: int
) -> DecodeConfig:
    """Tiles of 8 to 16 KiB of keys; several programs fit on a multiprocessor.

    Many sequences fill the GPU with programs, and small ones, longest first, balance best. So do
    the splits of some, if combining them is cheap; few need more loads in flight in each program.
    A cache of `bits` = 8 is converted besides, which takes registers: then fewer warps do more
    each. Measured on an H200; the block size makes no difference there.
    """
    if dtype == torch.float32:
        return DecodeConfig(block_n=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return DecodeConfig(block_n=32, num_warps=4, num_stages=3)
    widen = 2 if head_dim <= 64 else 1
    if bits == 8:
        if batch >= 192:
            return DecodeConfig(block_n=64 * widen, num_warps=1, num_stages=3)
        return DecodeConfig(block_n=(128 if batch >= 48 else 64) * widen, num_warps=2, num_stages=3)
    cheap_splits = num_heads <= 2 * kv_heads and 64 <= batch * kv_heads <= 384
    if batch >= 96 or cheap_splits:
        return DecodeConfig(32 * widen, num_warps=2, num_stages=4, num_programs=768)
    return DecodeConfig(block_n=64 * widen, num_warps=4, num_stages=3)


def paged_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What `paged_decode` computes."""
    out = torch.zeros_like(q)
    rows = zip(table_rows.tolist(), context_lens.tolist(), strict=True)
    for i, (row, length) in enumerate(rows):
        if length:
            table = block_tables[row, : -(-length // k_cache.shape[1])].long()
            out[i] = attend_row(q[i : i + 1], k_cache, v_cache, table, length, scale)[0]
    return out


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_splits: int | None = None,
    arrivals: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attend with one token per sequence to its whole context.

    Args:
        q: [B, num_heads, head_dim], contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], equal strides, the last
            two dimensions contiguous.
        block_tables: int32 [S, W].
        table_rows: int32 [B], the row of `block_tables` that is sequence b's; any if it has no
            context.
        context_lens: int32 [B]; 0 is padding, which reads nothing and gives zeros.
        scale: of the scores.
        num_splits: programs among which a context is split; None is as many as fill the GPU, up to
            `MAX_SPLITS`, which depends on shapes only, so that a captured graph holds for every
            length (GRF-3).
        arrivals: int32 [B * num_kv_heads], in which they count each other: zeros, also afterwards.
            Its own if None, which costs a kernel.
        config: instead of `decode_config`'s.

    Returns:
        [B, num_heads, head_dim].
    """
    assert q.is_contiguous(), q.stride()
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    batch, num_heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    bits = 8 * k_cache.element_size()
    config = config or decode_config(batch, num_heads, kv_heads, dim, q.dtype, bits)
    if num_splits is None:
        num_splits = min(MAX_SPLITS, max(1, config.num_programs // (batch * kv_heads)))
    group = next_power_of_2(num_heads // kv_heads)
    block_s = max(16, next_power_of_2(num_splits))
    out = torch.empty_like(q)
    partial = state = out
    if arrivals is None:
        arrivals = q.new_zeros(batch * kv_heads, dtype=torch.int32)
    assert arrivals.numel() >= batch * kv_heads, (arrivals.shape, batch, kv_heads)
    if num_splits > 1:
        partial = q.new_empty((batch, num_heads, num_splits, dim), dtype=torch.float32)
        state = q.new_empty((2, batch, num_heads, num_splits), dtype=torch.float32)
    _paged_decode_kernel[(kv_heads, batch, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        table_rows,
        context_lens,
        out,
        partial,
        state,
        arrivals,
        scale * LOG2_E,
        block_tables.stride(0),
        *k_cache.stride()[:2],
        NUM_HEADS=num_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=dim,
        BLOCK_SIZE=block_size,
        SPLIT=num_splits > 1,
        BLOCK_M=max(16, group),
        BLOCK_N=config.block_n,
        BLOCK_D=next_power_of_2(dim),
        BLOCK_G=group,
        BLOCK_S=block_s,
        # 32 values a thread when it combines.
        CHUNK=min(block_s, max(1, 1024 * config.num_warps // (group * next_power_of_2(dim)))),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # Early, programs of unequal length would crowd where there is room first.
        launch_pdl=num_splits > 1,
    )
    return out


@jit
def _paged_decode_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    table_rows,
    context_lens,
    out,
    partial,
    state,
    arrivals,
    scale,
    table_stride,
    block_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes `out`; `partial`, `state` and `arrivals` are for `combine_splits`."""
    wait_for_inputs()
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len = tl.load(context_lens + row)
    table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_stride

    group = tl.arange(0, BLOCK_M)
    head = row * NUM_HEADS + kv_head * GROUP + group
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (group < GROUP)[:, None] & (column < HEAD_DIM)
    queries = tl.load(q + head[:, None] * HEAD_DIM + column, inside, 0.0)

    tiles = tl.cdiv(tl.cdiv(context_len, BLOCK_N), num_splits)
    begin = split * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, context_len)
    peak, total, acc = attend_tiles(
        queries,
        tl.full([BLOCK_M], 0, tl.int32) + end,
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        k_cache + kv_head * HEAD_DIM,
        v_cache + kv_head * HEAD_DIM,
        table,
        begin,
        end,
        scale,
        block_stride,
        slot_stride,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        MASKED=True,
    )
    if SPLIT:
        combine_splits(
            peak,
            total,
            acc,
            partial,
            state,
            out,
            arrivals,
            NUM_HEADS,
            GROUP,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_G,
            BLOCK_S,
            CHUNK,
        )
    else:
        # The peak has weight 1, so only a row without context has less.
        acc = acc / tl.maximum(total, 1.0)[:, None]
        tl.store(out + head[:, None] * HEAD_DIM + column, acc, inside)
