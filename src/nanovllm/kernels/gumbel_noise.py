"""Gumbel noise that depends on (seed, position, token id) and on nothing else (SMP-4).

A counter-based generator has no state to keep, so a request draws the same tokens alone, in any
batch, after a preemption or inside a graph. The host mixes (seed, position) into two 32-bit words
per row; the device hashes them with each token id in 32-bit wrap-around arithmetic, which torch
has as int32 and Triton as uint32.

Constants: the 64-bit mixer is SplitMix64's finaliser (Steele, Lea, Flood, "Fast Splittable
Pseudorandom Number Generators", 2014, with Stafford's "Mix13" multipliers); the 32-bit rounds have
the shifts and multipliers of `triple32` (C. Wellons, hash-prospector, public domain), with the
second key word added after its first round.
"""

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX13 = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_TRIPLE32 = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_MAX_UNIFORM = 1.0 - 2.0**-24  # the largest fp32 below 1


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX13[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX13[1]
    return x ^ (x >> np.uint64(31))


def seed_streams(seed: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """What a device needs of a request's seed, [R] to [R]; mixed once, as it never changes.

    Seeds are mixed before a position is added, so that neighbouring seeds are not the same stream
    shifted by a few positions.
    """
    return _mix64(seed + _GOLDEN).view(np.int64)


def stream_keys(
    stream: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Two key words per row: [R] of `seed_streams` and [R] positions to [R, 2] int32."""
    mixed = _mix64(stream.view(np.uint64) + position.astype(np.uint64) * _GOLDEN)
    return mixed.view(np.int32).reshape(-1, 2)


def row_keys(
    seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Two key words per row: [R] seeds and [R] positions to [R, 2] int32."""
    return stream_keys(seed_streams(seed), position)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, one value per row and token id.

    `argmax(z + noise)` then is a draw from softmax(z). The noise is `-log(E)` with E exponential.
    A draw is decided by the smallest E of the row, about 1e-5 at a vocabulary of 150,000, and
    `E = -log1p(-u)` keeps fp32's relative precision there, down to u = 2**-33. The usual
    `E = -log(u)` would need u within 1e-5 of 1, where fp32 has only a few hundred values: ties, and
    rare tokens with a wrong share. u itself is clamped below 1, which touches certain losers only.

    Args:
        keys: [R, 2] int32 from `row_keys`.
        vocab_size: V.

    Returns:
        [R, V] fp32, finite.
    """
    x = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) ^ keys[:, :1]
    x = _round(x, 17, _TRIPLE32[0]).add_(keys[:, 1:])
    x = _round(x, 11, _TRIPLE32[1])
    x = _round(x, 15, _TRIPLE32[2])
    x = _round(x, 14, 1)
    uniform = x.view(torch.uint32).float().add_(0.5).mul_(2.0**-32).clamp_(max=_MAX_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _round(x: torch.Tensor, shift: int, factor: int) -> torch.Tensor:
    """x = (x ^ (x >> shift)) * factor in place, modulo 2**32, the shift filling with zeros."""
    signed = factor - 2**32 if factor >= 2**31 else factor
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(signed)
