"""Top-k, top-p and min-p as one threshold a row (SMP-3).

A token is kept if its logit is above the row's threshold, or equal to it and its id at most the
row's last id: among equals the lowest ids come first.

A program searches the threshold of a row without sorting it, among the ordered integers of logits.
A pass over the row weighs the tokens from three candidates on, by number or by probability, which
leaves a quarter of the range. Most passes are saved by where it begins:

- top-k: the k-th best of the bests of disjoint parts of the row is not above the k-th best of all;
- top-p: V tokens at `peak + T * log((1 - p) / V)` weigh no more than 1 - p of the best one alone;
  half of that is on the safe side of rounding.
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
        bests = _bests(x, vocab_size, BLOCK)
        peak = tl.max(bests, 0)
        peak = tl.where(peak == 0.0, 0.0, peak)  # -0 has another key, and is as good
        highest = _key(peak, BITS)
        lowest = _key(threshold, BITS)
        if by_rank:
            rank = k.to(tl.float32)
            lowest = tl.maximum(lowest, _key_of_rank(bests, rank, BITS))
            lowest = _search(x, vocab_size, lowest, highest, rank, peak, 0.0, BITS, BLOCK)
            threshold = _value(lowest, BITS)
        if p < 1.0:
            bound = peak + temperature * tl.log((1.0 - p) / (2.0 * vocab_size))
            lowest = tl.maximum(lowest, _key(bound, BITS))
            scale = LOG2_E / temperature
            threshold, last_id = _top_p(
                x, vocab_size, p, threshold, lowest, highest, peak, scale, BITS, BLOCK
            )
        if share > 0.0:
            least = peak + temperature * tl.log(share)
            last_id = tl.where(least > threshold, vocab_size, last_id)
            threshold = tl.maximum(threshold, tl.minimum(least, peak))
    tl.store(thresholds + row, threshold)
    tl.store(last_ids + row, last_id)


@jit
def _top_p(
    x,
    vocab_size,
    p,
    threshold,
    lowest,
    highest,
    peak,
    scale,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the tokens from `threshold` on, the last one that begins below a share p of their weight.

    Returns its logit, which is between those of the keys `lowest` and `highest`, and its id.
    """
    target = p * _weight_from(x, vocab_size, threshold, peak, scale, BLOCK)
    key = _search(x, vocab_size, lowest, highest, target, peak, scale, BITS, BLOCK)
    threshold = _value(key, BITS)
    above = _weight_from(x, vocab_size, _value(key + 1, BITS), peak, scale, BLOCK)
    each = tl.exp2((threshold - peak) * scale)
    count = tl.maximum(tl.ceil((target - above) / each), 1.0)
    return threshold, _last_of_equals(x, vocab_size, threshold, count, BLOCK)


@jit
def _key(value, BITS: tl.constexpr):
    """The ordered integer of a logit: the larger, the better.

    A bfloat16 is in the upper half of an fp32, so 16 bits are enough for it.
    """
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits | 0x80000000, ~bits) >> (32 - BITS)


@jit
def _value(key, BITS: tl.constexpr):
    """The logit that has this ordered integer; NaN, which no logit reaches, if there is none."""
    above = key << (32 - BITS)
    bits = tl.where(above >> 31 == 1, above ^ 0x80000000, ~(above | ((1 << (32 - BITS)) - 1)))
    return bits.to(tl.float32, bitcast=True)


@jit
def _load(x, token_id, vocab_size):
    """Logits; those of padding are not above any."""
    return tl.load(x + token_id, token_id < vocab_size, float("nan")).to(tl.float32)


@jit
def _bests(x, vocab_size, BLOCK: tl.constexpr):
    """The best logits of the BLOCK parts of the row that are congruent."""
    bests = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        bests = tl.maximum(bests, _load(x, start + tl.arange(0, BLOCK), vocab_size))
    return bests


@jit
def _key_of_rank(values, rank, BITS: tl.constexpr):
    """The largest key from which on there are `rank` of the values, or 0."""
    key = tl.zeros([], tl.uint32)
    bit = key + (1 << (BITS - 1))
    for _ in range(BITS):
        found = tl.sum((values >= _value(key | bit, BITS)).to(tl.float32), 0)
        key = tl.where(found >= rank, key | bit, key)
        bit = bit >> 1
    return key


@jit
def _weights(value, peak, scale):
    """exp((value - peak) / T), with `scale` = log2(e) / T; with a scale of 0 all weigh 1."""
    return tl.exp2(tl.maximum(value - peak, -3e38) * scale)


@jit
def _weight_from(x, vocab_size, threshold, peak, scale, BLOCK: tl.constexpr):
    """The weight of all tokens from `threshold` on."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        value = _load(x, start + tl.arange(0, BLOCK), vocab_size)
        total = tl.where(value >= threshold, total + _weights(value, peak, scale), total)
    return tl.sum(total, 0)


@jit
def _search(
    x, vocab_size, lowest, highest, target, peak, scale, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key up to `highest` from which on there is a weight of at least `target`.

    There must be so much from `lowest` on.
    """
    while lowest < highest:
        step = (highest - lowest) // 4 + 1  # three candidates leave four parts
        first = _value(lowest + step, BITS)
        second = _value(lowest + 2 * step, BITS)
        third = _value(lowest + 3 * step, BITS)
        from_first = tl.zeros([BLOCK], tl.float32)
        from_second = tl.zeros([BLOCK], tl.float32)
        from_third = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
            value = _load(x, start + tl.arange(0, BLOCK), vocab_size)
            weight = _weights(value, peak, scale)
            # An addition on a condition is one instruction; that of a choice would be two.
            from_first = tl.where(value >= first, from_first + weight, from_first)
            from_second = tl.where(value >= second, from_second + weight, from_second)
            from_third = tl.where(value >= third, from_third + weight, from_third)
        reached = (tl.sum(from_first, 0) >= target).to(tl.uint32)
        reached += (tl.sum(from_second, 0) >= target).to(tl.uint32)
        reached += (tl.sum(from_third, 0) >= target).to(tl.uint32)
        lowest += reached * step
        highest = tl.minimum(highest, lowest + step - 1)
    return lowest


@jit
def _last_of_equals(x, vocab_size, threshold, count, BLOCK: tl.constexpr):
    """The id of the token with which `count` at the threshold are reached, or of the last one."""
    seen = tl.zeros([], tl.float32)
    last_id = tl.zeros([], tl.int32) + vocab_size
    for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
        token_id = start + tl.arange(0, BLOCK)
        equal = (_load(x, token_id, vocab_size) == threshold).to(tl.float32)
        found = tl.sum(equal, 0)
        if (seen < count) & (seen + found >= count):
            rank = seen + tl.cumsum(equal, 0)
            last_id = tl.min(tl.where((equal == 1.0) & (rank >= count), token_id, vocab_size), 0)
        seen += found
    return last_id
