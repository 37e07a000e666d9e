"""Top-k, top-p and min-p as one threshold a row (SMP-3).

A token is kept if its logit is above the row's threshold, or equal to it and its id at most the
row's last id: among equals the lowest ids come first.

A program searches the threshold of a row without sorting it: bit by bit of the logits' ordered
integers, by how many tokens, or how much probability, there is from a candidate on.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import LOG2_E, jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs
from nanovllm.kernels.sample import LOWEST_TEMPERATURE, seat_of

_BLOCK = 4096


def sampling_threshold_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seats: torch.Tensor,
    thresholds: torch.Tensor,
    last_ids: torch.Tensor,
) -> None:
    """What `sampling_threshold` computes."""
    for i, seat in enumerate(seats.tolist()):
        values, ids = logits[i].float().sort(descending=True, stable=True)
        z, k, p = values / temperatures[seat], int(top_k[seat]), float(top_p[seat])
        kept = len(z)
        # A greedy row takes the best token, which is always kept.
        if temperatures[seat] >= LOWEST_TEMPERATURE:
            kept = int((z >= z[k - 1]).sum()) if 0 < k < kept else kept
            share = z[:kept].softmax(0).double()
            kept = int((share.cumsum(0) - share < p).sum()) if p < 1 else kept
            kept = min(kept, int((z >= z[0] + min_p[seat].log()).sum()))
        thresholds[i], last_ids[i] = values[kept - 1], ids[kept - 1]


def sampling_threshold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seats: torch.Tensor,
    thresholds: torch.Tensor,
    last_ids: torch.Tensor,
) -> None:
    """Write the threshold of each row.

    Args:
        logits: [B, V], any stride between rows.
        temperatures: fp32 [S].
        top_k: int32 [S], off unless `0 < k < V`.
        top_p: fp32 [S] in (0, 1], off at 1.
        min_p: fp32 [S] in [0, 1], off at 0.
        seats: int32 [B], which of those are the row's; -1, of a padding row, is the last.
        thresholds: fp32 [B], written.
        last_ids: int32 [B], written.
    """
    batch, vocab_size = logits.shape
    _threshold_kernel[(batch,)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        seats,
        thresholds,
        last_ids,
        vocab_size,
        logits.stride(0),
        NUM_SEATS=len(temperatures),
        LOWEST_TEMPERATURE=LOWEST_TEMPERATURE,
        LOG2_E=LOG2_E,
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        BLOCK=min(_BLOCK, next_power_of_2(vocab_size)),
        num_warps=16,
        launch_pdl=True,
    )


@jit
def _threshold_kernel(
    logits,
    temperatures,
    top_k,
    top_p,
    min_p,
    seats,
    thresholds,
    last_ids,
    vocab_size,
    logits_stride,
    NUM_SEATS: tl.constexpr,
    LOWEST_TEMPERATURE: tl.constexpr,
    LOG2_E: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_inputs()
    row = tl.program_id(0)
    seat = seat_of(seats + row, NUM_SEATS)
    temperature = tl.load(temperatures + seat)
    k = tl.load(top_k + seat)
    p = tl.load(top_p + seat)
    share = tl.load(min_p + seat)
    by_rank = (k > 0) & (k < vocab_size)
    threshold = tl.full([], float("-inf"), tl.float32)
    last_id = tl.zeros([], tl.int32) + vocab_size
    if (temperature >= LOWEST_TEMPERATURE) & (by_rank | (p < 1.0) | (share > 0.0)):
        x = logits + row.to(tl.int64) * logits_stride
        peak = _peak(x, vocab_size, BLOCK)
        scale = LOG2_E / temperature
        key = tl.zeros([], tl.uint32)
        if by_rank:
            key = _search(x, vocab_size, key, k.to(tl.float32), peak, 0.0, BITS, BLOCK)
        if p < 1.0:
            target = p * _sum_from(x, vocab_size, key, peak, scale, BITS, BLOCK)
            key = _search(x, vocab_size, key, target, peak, scale, BITS, BLOCK)
            above = _sum_from(x, vocab_size, key + 1, peak, scale, BITS, BLOCK)
            each = tl.exp2((_value(key, BITS) - peak) * scale)
            count = tl.maximum(tl.ceil((target - above) / each), 1.0)
            last_id = _last_of_equals(x, vocab_size, key, count, BITS, BLOCK)
        if key > 0:
            threshold = _value(key, BITS)
        if share > 0.0:
            lowest = peak + temperature * tl.log(share)
            last_id = tl.where(lowest > threshold, vocab_size, last_id)
            threshold = tl.maximum(threshold, lowest)
    tl.store(thresholds + row, threshold)
    tl.store(last_ids + row, last_id)


@jit
def _load(x, start, vocab_size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the row, and its ordered integers: the larger, the better; 0 is padding.

    A bfloat16 is in the upper half of an fp32, so 16 bits are enough for it.
    """
    token_id = start + tl.arange(0, BLOCK)
    inside = token_id < vocab_size
    value = tl.load(x + token_id, inside, float("-inf")).to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value)  # -0 is as good as 0
    bits = value.to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 == 0, bits | 0x80000000, ~bits)
    return value, tl.where(inside, ordered >> (32 - BITS), 0)


@jit
def _value(key, BITS: tl.constexpr):
    """The logit that has this ordered integer."""
    above = key << (32 - BITS)
    bits = tl.where(above >> 31 == 1, above ^ 0x80000000, ~(above | ((1 << (32 - BITS)) - 1)))
    return bits.to(tl.float32, bitcast=True)


@jit
def _peak(x, vocab_size, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token_id = start + tl.arange(0, BLOCK)
        value = tl.load(x + token_id, token_id < vocab_size, float("-inf"))
        best = tl.maximum(best, value.to(tl.float32))
    return tl.max(best, 0)


@jit
def _sum_from(x, vocab_size, key, peak, scale, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of all tokens from `key` on; with a scale of 0 each weighs 1."""
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        value, keys = _load(x, start, vocab_size, BITS, BLOCK)
        weight = tl.exp2(tl.maximum(value - peak, -1e30) * scale)
        weights += tl.where((keys >= key) & (keys > 0), weight, 0.0)
    return tl.sum(weights, 0)


@jit
def _search(x, vocab_size, lowest, target, peak, scale, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which on there is a weight of at least `target`, or else `lowest`."""
    key = lowest & 0
    bit = key + (1 << (BITS - 1))
    for _ in range(BITS):
        candidate = tl.maximum(key | bit, lowest)
        found = _sum_from(x, vocab_size, candidate, peak, scale, BITS, BLOCK)
        key = tl.where(found >= target, key | bit, key)
        bit = bit >> 1
    return tl.maximum(key, lowest)


@jit
def _last_of_equals(x, vocab_size, key, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the token with which `count` of this key are reached, or of the last one."""
    seen = 0
    last_id = -1
    for start in range(0, vocab_size, BLOCK):
        _, keys = _load(x, start, vocab_size, BITS, BLOCK)
        equal = (keys == key).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        token_id = start + tl.arange(0, BLOCK)
        first = (equal == 1) & (rank.to(tl.float32) <= count)
        last_id = tl.maximum(last_id, tl.max(tl.where(first, token_id, -1), 0))
        seen += tl.sum(equal, 0)
    return last_id
