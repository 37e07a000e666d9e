"""The loop that decode and prefill attention share: online softmax over tiles of the paged cache.

Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; over
tiles and with powers of two: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from nanovllm.kernels._triton import jit, tl

LOG2_E = 1.4426950408889634
"""Launchers multiply the scale of the scores by it: exp(x) = exp2(x * log2(e))."""


@jit
def attend_tiles(
    q,
    seen,
    peak,
    total,
    acc,
    keys,
    values,
    table,
    begin,
    end,
    scale,
    block_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend with the M rows of q to positions `[begin, end)` of one KV head.

    Slots outside are not read, as 0 * NaN would be NaN (KV-3). Offsets into the cache have 64 bits
    (KV-6).

    Args:
        q: [M, D], D >= HEAD_DIM a power of two.
        seen: int32 [M], row m attends to positions below `seen[m]`, if MASKED; else to all, and
            `end - begin` is a multiple of BLOCK_N.
        peak, total, acc: fp32 [M], [M], [M, D], the state of the online softmax: largest scaled
            score, sum of the weights, weighted sum of the values.
        keys, values: pointers to this head in slot 0.
        table: pointer to the block table.
        scale: of the scores, times log2(e).

    Returns:
        The new (peak, total, acc).
    """
    column = tl.arange(0, q.shape[1])[None, :]
    # fp16 has every value of fp8, and there is an instruction that converts two at once.
    in_fp8: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    queries = q.to(tl.float16) if in_fp8 else q
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + n // BLOCK_SIZE, n < end, 0)
        else:
            block = tl.load(table + n // BLOCK_SIZE)
        slot = block.to(tl.int64) * block_stride + n % BLOCK_SIZE * slot_stride
        offset = slot[:, None] + column
        if MASKED or q.shape[1] != HEAD_DIM:
            inside = (n < end)[:, None] & (column < HEAD_DIM)
            k = tl.load(keys + offset, inside, 0.0)
            v = tl.load(values + offset, inside, 0.0)
        else:
            k = tl.load(keys + offset)
            v = tl.load(values + offset)
        scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision="ieee")
        if MASKED:
            scores = tl.where(n[None, :] < seen[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(queries.dtype), v.to(queries.dtype), acc, input_precision="ieee")
        peak = new_peak
    return peak, total, acc
