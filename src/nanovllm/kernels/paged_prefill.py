"""Paged prefill attention: ragged rows of query tokens at the ends of their contexts (KV-3..6).

It always reads the paged cache, where this step's keys and values are stored before, so that a
prefix hit or an earlier chunk is nothing special, and a row of one token is a decode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._triton import LOG2_E, jit, next_power_of_2, tl
from nanovllm.kernels.paged_attention import attend_row
from nanovllm.kernels.paged_tiles import attend_tiles


class PrefillConfig(NamedTuple):
    """How a program works: query heads x tokens, positions, warps, depth of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """One size of tiles for all lengths: short prompts are not worth another compilation."""
    if dtype == torch.float32:
        block = 32 if head_dim <= 128 else 16
        return PrefillConfig(block_m=block, block_n=block, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillConfig(block_m=128, block_n=32, num_warps=8, num_stages=3)
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)


def paged_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What `paged_prefill` computes."""
    out = torch.empty_like(q)
    bounds = cu_seqlens_q.tolist()
    rows = zip(table_rows.tolist(), context_lens.tolist(), strict=True)
    for i, (row, length) in enumerate(rows):
        tokens = slice(bounds[i], bounds[i + 1])
        table = block_tables[row, : -(-length // k_cache.shape[1])].long()
        out[tokens] = attend_row(q[tokens], k_cache, v_cache, table, length, scale)
    return out


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention of R rows of tokens, each the last ones of its sequence's context.

    Args:
        q: [T, num_heads, head_dim], contiguous, the rows one after the other.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], equal strides, the last
            two dimensions contiguous; they hold the rows' own keys and values, too.
        block_tables: int32 [S, W].
        table_rows: int32 [R], the row of `block_tables` that is row r's.
        cu_seqlens_q: int32 [R + 1], row r is tokens `[cu_seqlens_q[r], cu_seqlens_q[r + 1])`.
        context_lens: int32 [R], positions including the row's own.
        scale: of the scores.
        config: instead of `prefill_config`'s.

    Returns:
        [T, num_heads, head_dim].
    """
    assert q.is_contiguous(), q.stride()
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    num_tokens, num_heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = num_heads // kv_heads
    config = config or prefill_config(dim, q.dtype)
    block_m = max(config.block_m, next_power_of_2(group))
    num_rows = len(context_lens)
    out = torch.empty_like(q)
    # Every row may end with a tile that is not full.
    tiles = num_tokens // (block_m // group) + num_rows
    _paged_prefill_kernel[(kv_heads, tiles)](
        q,
        k_cache,
        v_cache,
        block_tables,
        table_rows,
        cu_seqlens_q,
        context_lens,
        out,
        num_rows,
        scale * LOG2_E,
        block_tables.stride(0),
        *k_cache.stride()[:2],
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=next_power_of_2(dim),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@jit
def _paged_prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    table_rows,
    cu_seqlens_q,
    context_lens,
    out,
    num_rows,
    scale,
    table_stride,
    block_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One KV head and a tile of up to `BLOCK_M // GROUP` tokens of one row, with all query heads.

    Tiles are numbered as if row r began at tile `cu_seqlens_q[r] // tokens + r`: room for all, and
    found without a list of tiles. The last tiles, which see most, start first.
    """
    tokens: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _find_row(cu_seqlens_q, num_rows, tile, tokens)
    first = tl.load(cu_seqlens_q + row)
    count = tl.load(cu_seqlens_q + row + 1) - first
    start = (tile - first // tokens - row) * tokens
    if start < count:
        m = tl.arange(0, BLOCK_M)
        token = start + m // GROUP
        column = tl.arange(0, BLOCK_D)[None, :]
        inside = ((token < count) & (m < tokens * GROUP))[:, None] & (column < HEAD_DIM)
        head = (first + token).to(tl.int64) * NUM_HEADS + kv_head * GROUP + m % GROUP
        offset = head[:, None] * HEAD_DIM + column
        queries = tl.load(q + offset, inside, 0.0)

        table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_stride
        computed = tl.load(context_lens + row) - count
        seen = computed + token + 1
        end = computed + tl.minimum(start + tokens, count)
        # Tiles that every token sees need no mask.
        unmasked_end = (computed + start + 1) // BLOCK_N * BLOCK_N
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for masked in tl.static_range(2):
            peak, total, acc = attend_tiles(
                queries,
                seen,
                peak,
                total,
                acc,
                k_cache + kv_head * HEAD_DIM,
                v_cache + kv_head * HEAD_DIM,
                table,
                unmasked_end if masked else 0,
                end if masked else unmasked_end,
                scale,
                block_stride,
                slot_stride,
                HEAD_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                MASKED=masked == 1,
            )
        tl.store(out + offset, acc / total[:, None], inside)


@jit
def _find_row(cu_seqlens_q, num_rows, tile, TOKENS: tl.constexpr):
    """The last row whose first tile is at most `tile`, by bisection."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low
