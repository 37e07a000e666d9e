"""Draws a token per row: the argmax of `logits / T` plus Gumbel noise, or of the logits (SMP-1..5).

The noise is `gumbel_noise`'s, `-log(E)` with E exponential, and the kernel looks for the smallest
`cost = E * exp((peak - logit) / T)`, which is the same token with a logarithm less for each. The
vocabulary is cut into chunks, each with the peak of its own; the second kernel makes their best
costs comparable.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import LOG2_E, cdiv, jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs
from nanovllm.kernels.gumbel_noise import gumbel_noise, stream_keys

_CHUNK = 4096
LOWEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""A temperature below fp32's normal range is greedy."""


def sample_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    streams: torch.Tensor,
    seats: torch.Tensor,
    positions: torch.Tensor,
    thresholds: torch.Tensor,
    last_ids: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """What `sample` computes."""
    temperatures, streams = temperatures[seats.long()], streams[seats.long()]
    logits, limit = logits.float(), thresholds[:, None]
    equals = torch.arange(logits.shape[1], device=logits.device) <= last_ids[:, None]
    kept = (logits > limit) | ((logits == limit) & equals)
    peak = logits.amax(dim=-1, keepdim=True)
    keys = torch.from_numpy(stream_keys(streams.cpu().numpy(), positions.cpu().numpy()))
    noise = gumbel_noise(keys.to(logits.device), logits.shape[1])
    perturbed = (logits - peak) / temperatures[:, None] + noise
    greedy = temperatures[:, None] < LOWEST_TEMPERATURE
    perturbed = perturbed.masked_fill(~kept, -torch.inf)
    drawn = torch.where(greedy, logits, perturbed).argmax(dim=-1)
    token_ids.copy_(drawn.masked_fill(~peak[:, 0].isfinite(), -1))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    streams: torch.Tensor,
    seats: torch.Tensor,
    positions: torch.Tensor,
    thresholds: torch.Tensor,
    last_ids: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Draw a token per row; the lowest id on ties.

    -1 in a row with NaN or +inf, or with nothing above -inf (SMP-5).

    Args:
        logits: [B, V], any stride between rows.
        temperatures: fp32 [S].
        streams: int64 [S], `seed_streams` of seeds.
        seats: int32 [B], which of those are the row's; -1, of a padding row, is the last.
        positions: int32 [B], what the noise depends on besides.
        thresholds: fp32 [B], last_ids: int32 [B], which tokens are kept: `sampling_threshold`'s.
        token_ids: int64 [B], written.
    """
    batch, vocab_size = logits.shape
    chunks = cdiv(vocab_size, _CHUNK)
    best = logits.new_empty((2, batch, chunks), dtype=torch.float32)
    best_ids = logits.new_empty((batch, chunks), dtype=torch.int32)
    _sample_chunk_kernel[(chunks, batch)](
        logits,
        temperatures,
        streams,
        seats,
        positions,
        thresholds,
        last_ids,
        best,
        best_ids,
        vocab_size,
        logits.stride(0),
        NUM_SEATS=len(temperatures),
        LOWEST_TEMPERATURE=LOWEST_TEMPERATURE,
        LOG2_E=LOG2_E,
        BLOCK=_CHUNK,
        num_warps=8,
        launch_pdl=True,
    )
    _best_chunk_kernel[(batch,)](
        best,
        best_ids,
        temperatures,
        seats,
        token_ids,
        chunks,
        NUM_SEATS=len(temperatures),
        LOWEST_TEMPERATURE=LOWEST_TEMPERATURE,
        BLOCK=next_power_of_2(chunks),
        num_warps=1,
        launch_pdl=True,
    )


@jit
def _sample_chunk_kernel(
    logits,
    temperatures,
    streams,
    seats,
    positions,
    thresholds,
    last_ids,
    best,
    best_ids,
    vocab_size,
    logits_stride,
    NUM_SEATS: tl.constexpr,
    LOWEST_TEMPERATURE: tl.constexpr,
    LOG2_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The peak of a chunk, the lowest cost, and whose it is."""
    wait_for_inputs()
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    token_id = chunk * BLOCK + tl.arange(0, BLOCK)
    start = logits + row.to(tl.int64) * logits_stride
    x = tl.load(start + token_id, token_id < vocab_size, float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a maximum may pass over NaN
    threshold = tl.load(thresholds + row)
    if threshold > float("-inf"):
        equal = (x == threshold) & (token_id <= tl.load(last_ids + row))
        x = tl.where((x > threshold) | equal, x, float("-inf"))
    peak = tl.max(x, 0)
    # Relative to an infinite peak there would be NaN; to 0, a chunk of -inf has costs of +inf.
    gap = _finite_or_0(peak) - x
    seat = seat_of(seats + row, NUM_SEATS)
    temperature = tl.load(temperatures + seat)
    if temperature < LOWEST_TEMPERATURE:
        cost = gap
    else:
        key = row_key(tl.load(streams + seat), tl.load(positions + row))
        cost = exponential(token_id, key) * tl.exp2(gap * (LOG2_E / temperature))
    lowest, index = tl.min(cost, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(0) + chunk
    tl.store(best + out, peak)
    tl.store(best + tl.num_programs(0) * tl.num_programs(1) + out, lowest)
    tl.store(best_ids + out, chunk * BLOCK + index)


@jit
def _best_chunk_kernel(
    best,
    best_ids,
    temperatures,
    seats,
    token_ids,
    num_chunks,
    NUM_SEATS: tl.constexpr,
    LOWEST_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a row: the logarithms of its chunks' costs, all relative to the row's peak."""
    wait_for_inputs()
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    offset = row * num_chunks + chunk
    peaks = tl.load(best + offset, inside, float("-inf"))
    costs = tl.load(best + tl.num_programs(0) * num_chunks + offset, inside, float("inf"))
    ids = tl.load(best_ids + offset, inside, -1)
    peak = tl.max(peaks, 0)
    gaps = _finite_or_0(peak) - peaks
    temperature = tl.load(temperatures + seat_of(seats + row, NUM_SEATS))
    if temperature >= LOWEST_TEMPERATURE:
        gaps = gaps / temperature + tl.log(costs)
    _, index = tl.min(gaps, 0, return_indices=True, return_indices_tie_break_left=True)
    token_id = tl.max(tl.where(chunk == index, ids, -1), 0)
    tl.store(token_ids + row, tl.where(tl.abs(peak) == float("inf"), -1, token_id))


@jit
def seat_of(pointer, NUM_SEATS: tl.constexpr):
    """The seat of a row; that of padding is the last."""
    seat = tl.load(pointer)
    return tl.where(seat < 0, NUM_SEATS - 1, seat)


@jit
def _finite_or_0(x):
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@jit
def row_key(stream, position):
    """`stream_keys`: SplitMix64's finaliser of one row, uint64."""
    x = stream.to(tl.uint64) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def exponential(token_id, key):
    """E of each token: `gumbel_noise` is -log(E)."""
    x = token_id.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB + (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = x ^ (x >> 14)
    u = tl.minimum(x.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    # -log1p(-u); by its series where 1 - u would lose the digits of u.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return tl.where(u < 2.0**-6, series, -tl.log(1.0 - u))
