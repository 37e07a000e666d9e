"""Top-k, top-p and min-p: what they keep, in which order, and how it is drawn."""

import numpy as np
import pytest
import torch
from sampling import assert_chi_square, draw, drawn_ids, sample

from nanovllm.layers.sampler import RowSampling
from nanovllm.sampling_params import SamplingParams


@pytest.mark.spec("SMP-3a")
def test_top_k() -> None:
    logits = [0.0, 1.0, 2.0, 1.0, -1.0]
    assert drawn_ids(logits, top_k=1) == {2}
    assert drawn_ids(logits, top_k=2) == {1, 2, 3}
    assert drawn_ids(logits, top_k=4) == {0, 1, 2, 3}
    for off in (0, -1, 5, 6, 10**9):
        np.testing.assert_array_equal(draw(logits, 400, top_k=off), draw(logits, 400))


@pytest.mark.spec("SMP-3b")
def test_top_p_is_the_smallest_set_with_the_crossing_token() -> None:
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    for top_p, kept in [
        (1e-9, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {0, 1, 3}),
    ]:
        assert drawn_ids(logits, top_p=top_p) == kept
    assert drawn_ids(torch.zeros(8), top_p=0.5) == {0, 1, 2, 3}


@pytest.mark.spec("SMP-3c")
def test_min_p_is_relative_to_the_best_token() -> None:
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    for min_p, kept in [
        (1.0, {1}),
        (0.76, {1}),
        (0.74, {1, 3}),
        (0.26, {0, 1, 3}),
        (0.2, {0, 1, 2, 3}),
    ]:
        assert drawn_ids(logits, min_p=min_p) == kept


@pytest.mark.spec("SMP-3a", "SMP-3b", "SMP-3c")
def test_order_of_the_filters() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two left by top-k the first has 4/7, enough for top-p.
    assert drawn_ids(logits, top_k=2, top_p=0.5) == {0}
    # Temperature 4 leaves the first with 0.30, temperature 1 with 0.40.
    assert drawn_ids(logits, top_p=0.35, temperature=1.0) == {0}
    assert drawn_ids(logits, top_p=0.35, temperature=4.0) == {0, 1}
    assert drawn_ids(logits, min_p=0.6, temperature=1.0) == {0, 1}
    assert drawn_ids(logits, min_p=0.6, temperature=4.0) == {0, 1, 2, 3}
    # A penalty comes first: it decides which token is the best one.
    rows = [RowSampling(SamplingParams(top_k=1, presence_penalty=1), 0, i, (), [0]) for i in (0, 1)]
    assert sample(logits.repeat(2, 1), rows).token_ids == [1, 1]


@pytest.mark.spec("SMP-2", "SMP-3a", "SMP-3b", "SMP-3c")
def test_draws_follow_the_renormalised_softmax_of_what_is_kept() -> None:
    logits = torch.tensor([1.0, 0.0, -1.5, 0.5, 2.0, 0.0, -1.0, 1.5])
    counts = np.bincount(draw(logits, 10_000, top_k=6, top_p=0.9, min_p=0.15), minlength=8)
    kept = [0, 3, 4, 7]
    assert counts.sum() == counts[kept].sum()
    assert_chi_square(counts[kept], logits[kept].double().softmax(-1).numpy())


def kept_by_definition(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Temperature, top-k, top-p, min-p, one token after another."""
    z = logits.astype(np.float64) / params.temperature
    kept = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if params.top_k > 0:
        kth = z[kept[min(params.top_k, len(kept)) - 1]]
        kept = [i for i in kept if z[i] >= kth]
    mass = np.exp(z[kept] - z.max())
    reached = np.cumsum(mass / mass.sum()) >= params.top_p
    if params.top_p < 1:
        kept = kept[: int(reached.argmax()) + 1]
    return {i for i in kept if np.exp(z[i] - z.max()) >= params.min_p}


@pytest.mark.spec("SMP-3a", "SMP-3b", "SMP-3c", "SMP-4")
def test_mixed_filters_against_their_definition() -> None:
    """Thirty different rows in one batch, each drawn 60 times: all inside its own kept set."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.integers(-6, 6, (30, 40)).astype(np.float32) / 2)
    asked = [
        SamplingParams(
            temperature=rng.choice([0.7, 1.0, 1.6]),
            top_k=int(rng.choice([0, 1, 3, 10, 50])),
            top_p=rng.choice([0.13, 0.57, 0.93, 1.0]),
            min_p=rng.choice([0.0, 0.03, 0.31]),
        )
        for _ in range(30)
    ]
    kept = [kept_by_definition(row.numpy(), p) for row, p in zip(logits, asked, strict=True)]
    seen: list[set[int]] = [set() for _ in asked]
    for position in range(60):
        rows = [RowSampling(p, i, position) for i, p in enumerate(asked)]
        for i, token_id in enumerate(sample(logits, rows).token_ids):
            seen[i].add(token_id)
    assert all(s <= k for s, k in zip(seen, kept, strict=True))
    assert sum(s == k for s, k in zip(seen, kept, strict=True)) >= 10
