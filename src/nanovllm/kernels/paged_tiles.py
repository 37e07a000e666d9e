"""The loop that decode and prefill attention share: online softmax over tiles of the paged cache.

Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; over
tiles and with powers of two: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from nanovllm.kernels._triton import jit, tl
from nanovllm.kernels.fp8_pairs import join_columns, split_columns, unpack_pairs


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
    in_fp8: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    per_word: tl.constexpr = 2 if in_fp8 else 1
    if in_fp8:
        keys = keys.to(tl.pointer_type(tl.int16))
        values = values.to(tl.pointer_type(tl.int16))
        q, q_odd = split_columns(q.to(tl.float16))
        acc, acc_odd = split_columns(acc)
    else:
        q_odd, acc_odd = q, acc  # not used
    column = tl.arange(0, q.shape[1])[None, :]
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + n // BLOCK_SIZE, n < end, 0)
        else:
            block = tl.load(table + n // BLOCK_SIZE)
        slot = block.to(tl.int64) * (block_stride // per_word)
        slot += n % BLOCK_SIZE * (slot_stride // per_word)
        offset = slot[:, None] + column
        if MASKED or q.shape[1] * per_word != HEAD_DIM:
            inside = (n < end)[:, None] & (column < HEAD_DIM // per_word)
            k = tl.load(keys + offset, inside, 0)
            v = tl.load(values + offset, inside, 0)
        else:
            k = tl.load(keys + offset)
            v = tl.load(values + offset)
        scores = _scores(q, q_odd, tl.trans(k), in_fp8)
        if MASKED:
            scores = tl.where(n[None, :] < seen[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc, acc_odd = _add_values(acc, acc_odd, shrink[:, None], weights.to(q.dtype), v, in_fp8)
        peak = new_peak
    if in_fp8:
        acc = join_columns(acc, acc_odd)
    return peak, total, acc


@jit
def _scores(q, q_odd, k, IN_FP8: tl.constexpr):
    """q @ k; of an fp8 cache, the even and the odd columns of q with the words of k."""
    if IN_FP8:
        k_even, k_odd = unpack_pairs(k)
        scores = tl.dot(q_odd, k_odd, tl.dot(q, k_even))
    else:
        scores = tl.dot(q, k, input_precision="ieee")
    return scores


@jit
def _add_values(acc, acc_odd, shrink, weights, v, IN_FP8: tl.constexpr):
    """acc * shrink + weights @ v; of an fp8 cache, its even and its odd columns."""
    if IN_FP8:
        v_even, v_odd = unpack_pairs(v)
        acc = tl.dot(weights, v_even, acc * shrink)
        acc_odd = tl.dot(weights, v_odd, acc_odd * shrink)
    else:
        acc = tl.dot(weights, v, acc * shrink, input_precision="ieee")
    return acc, acc_odd
