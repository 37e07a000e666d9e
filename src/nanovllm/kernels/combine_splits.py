"""The results of a context's splits as one, by the program that has finished last.

A split leaves an unnormalised result with the state of its online softmax ("Flash-Decoding", Dao et
al., 2023). Programs count each other, so that this needs no kernel of its own.
"""

from __future__ import annotations

from nanovllm.kernels._triton import jit, tl


@jit
def combine_splits(
    peak,
    total,
    acc,
    partial,
    state,
    out,
    arrivals,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Hand in the results of a split; the last one to do so writes `out`.

    The grid is (num_kv_heads, B, splits).

    Args:
        peak, total, acc: fp32 [M], [M], [M, D], of which GROUP rows and HEAD_DIM columns are real:
            largest scaled score, sum of the weights, weighted sum of the values.
        partial: pointer to fp32 [B, NUM_HEADS, splits, HEAD_DIM], for each acc.
        state: pointer to fp32 [2, B, NUM_HEADS, splits], for each peak and total.
        out: pointer to [B, NUM_HEADS, HEAD_DIM].
        arrivals: pointer to int32 [B, num_kv_heads], how many splits have come; 0 again in the end.
        CHUNK: splits that are combined at a time.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    first = row * NUM_HEADS + kv_head * GROUP
    parts = tl.num_programs(1) * NUM_HEADS * num_splits
    group = tl.arange(0, peak.shape[0])
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (group < GROUP)[:, None] & (column < HEAD_DIM)
    part = (first + group) * num_splits + split
    tl.store(state + part, peak, group < GROUP)
    tl.store(state + parts + part, total, group < GROUP)
    tl.store(partial + part[:, None] * HEAD_DIM + column, acc, inside)
    tl.debug_barrier()  # all of this is written before the program is counted
    arrived = arrivals + row * tl.num_programs(0) + kv_head
    if tl.atomic_add(arrived, 1) == num_splits - 1:
        _combine(
            partial,
            state,
            out,
            first,
            num_splits,
            parts,
            GROUP,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_G,
            BLOCK_S,
            CHUNK,
        )
        tl.store(arrived, 0)


@jit
def _combine(
    partial,
    state,
    out,
    first,
    num_splits,
    parts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The results of GROUP heads, from `first` on, from those of their splits, CHUNK at a time."""
    member = tl.arange(0, BLOCK_G)
    head = (first + member)[:, None]
    part, there = _parts(head, 0, num_splits, member < GROUP, BLOCK_S)
    # What others wrote is in the second-level cache.
    peaks = tl.load(state + part, there, float("-inf"), cache_modifier=".cg")
    totals = tl.load(state + parts + part, there, 0.0, cache_modifier=".cg")
    # A split without positions has the peak -inf and so no weight, also when all are like that.
    peak = tl.maximum(tl.max(peaks, 1), -3e38)[:, None]
    total = tl.sum(totals * tl.exp2(peaks - peak), 1)[:, None]

    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (member < GROUP)[:, None] & (column < HEAD_DIM)
    for start in range(0, num_splits, CHUNK):
        some, real = _parts(head, start, num_splits, member < GROUP, CHUNK)
        weights = tl.load(state + some, real, float("-inf"), cache_modifier=".cg")
        weights = tl.exp2(weights - peak)
        values = tl.load(
            partial + some[:, :, None] * HEAD_DIM + column[None, :, :],
            real[:, :, None] & (column < HEAD_DIM)[None, :, :],
            0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(values * weights[:, :, None], 1)
    tl.store(out + head * HEAD_DIM + column, acc / tl.maximum(total, 1.0), inside)


@jit
def _parts(head, start, num_splits, owned, COUNT: tl.constexpr):
    """Where COUNT splits of each head are, from `start` on, and which of them there are."""
    split = start + tl.arange(0, COUNT)[None, :]
    return head * num_splits + split, owned[:, None] & (split < num_splits)
