"""Draws of the sampler, and the chi-square test that judges them.

Tests use fixed seeds, so that they give the same verdict on every run.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch

from nanovllm.layers.sampler import RowSampling, Sampler, SamplerOutput, SamplingInput
from nanovllm.sampling_params import SamplingParams

ALPHA = 1e-3
LARGE_VOCAB = 151_936  # Qwen3's
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> SamplerOutput:
    return Sampler()(logits, SamplingInput.from_rows(rows))


def draw(logits: Sequence[float] | torch.Tensor, count: int, **params: object) -> np.ndarray:
    """`count` draws of one request (seed 1234) from the same logits at successive positions."""
    row = torch.as_tensor(logits)
    asked = SamplingParams(**params)
    rows = [RowSampling(asked, 1234, position) for position in range(count)]
    return np.array(sample(row.expand(count, -1), rows).token_ids)


def drawn_ids(logits: Sequence[float] | torch.Tensor, **params: object) -> set[int]:
    return set(draw(logits, 400, **params).tolist())


def assert_chi_square(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's test; the quantile by Wilson and Hilferty's approximation."""
    expected = probabilities * counts.sum()
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = ((counts - expected) ** 2 / expected).sum()
    df = counts.size - 1
    z = NormalDist().inv_cdf(1 - ALPHA)
    limit = df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} with {df} degrees, limit {limit:.1f}"


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
