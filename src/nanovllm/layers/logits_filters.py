"""Top-k, top-p and min-p (SMP-3): what they drop becomes minus infinity, the best token stays."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def filter_logits_(
    z: torch.Tensor,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> None:
    """Apply each filter, in place, to the rows of z that ask for it.

    Args:
        z: [R, V] fp32, logits already divided by the temperature.
        top_k: [R], off unless `0 < k < V`.
        top_p: [R] in (0, 1], off at 1.
        min_p: [R] in [0, 1], off at 0.
    """
    stages = (
        (keep_top_k, top_k, (top_k > 0) & (top_k < z.shape[1])),
        (keep_top_p, top_p, top_p < 1.0),
        (keep_min_p, min_p, min_p > 0.0),
    )
    for keep, limits, asks in stages:
        if asks.any():
            rows = torch.from_numpy(np.flatnonzero(asks)).to(z.device)
            z[rows] = keep(z[rows], limits[asks])


def keep_top_k(z: torch.Tensor, k: npt.NDArray[Any]) -> torch.Tensor:
    """Keeps the k largest and every tie of the k-th, `1 <= k <= V`."""
    largest = z.topk(int(k.max()), dim=-1).values
    kth = largest.gather(-1, _column(k, z) - 1)
    return z.masked_fill(z < kth, -torch.inf)


def keep_top_p(z: torch.Tensor, p: npt.NDArray[Any]) -> torch.Tensor:
    """Keeps the smallest set whose probability reaches p, among ties the lowest ids."""
    ordered, index = z.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = ordered.masked_fill(mass_before >= _column(p, z), -torch.inf)
    return torch.empty_like(z).scatter_(-1, index, kept)


def keep_min_p(z: torch.Tensor, p: npt.NDArray[Any]) -> torch.Tensor:
    """Keeps tokens at least p times as probable as the best, `0 < p <= 1`."""
    threshold = z.amax(dim=-1, keepdim=True) + _column(np.log(p).astype(np.float32), z)
    return z.masked_fill(z < threshold, -torch.inf)


def _column(limits: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(limits).to(like.device)[:, None]
