"""What the sampler draws follows the softmax, for common tokens and rare ones."""

import math

import numpy as np
import pytest
import torch
from sampling import LARGE_VOCAB, assert_chi_square, draw

from nanovllm.kernels.gumbel_noise import gumbel_noise, row_keys


@pytest.mark.spec("SMP-2")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.5, 0.5, 2.0, 0.0, -1.0, 1.5])
    probabilities = (logits / temperature).double().softmax(-1).numpy()
    counts = np.bincount(draw(logits, 20_000, temperature=temperature), minlength=8)
    assert_chi_square(counts, probabilities)


@pytest.mark.spec("SMP-2", "SMP-4")
@pytest.mark.parametrize("what", ["positions", "seeds", "seeds and positions", "far seeds"])
def test_neighbouring_draws_are_independent(what: str) -> None:
    """Pairs of draws of two neighbouring streams fill the square evenly, on and off diagonal."""
    count, vocab = 20_000, 8
    first = np.arange(count, dtype=np.int64)
    zero, one = np.zeros_like(first), np.ones_like(first)
    seed_step, position_step = {
        "positions": (0, 1),
        "seeds": (1, 0),
        "seeds and positions": (1, -1),
        "far seeds": (2**63, 0),
    }[what]
    seed = (zero if what == "positions" else first).astype(np.uint64)
    position = first if what == "positions" else one
    left = gumbel_noise(torch.from_numpy(row_keys(seed, position)), vocab).argmax(-1)
    moved = row_keys(seed + np.uint64(seed_step), position + position_step)
    right = gumbel_noise(torch.from_numpy(moved), vocab).argmax(-1)
    counts = np.bincount((left * vocab + right).numpy(), minlength=vocab**2)
    assert_chi_square(counts, np.full(vocab**2, vocab**-2.0))


@pytest.mark.spec("SMP-2")
def test_rare_tokens_of_a_large_vocabulary_get_their_share() -> None:
    """Half the mass on one token, the rest spread over 151,935, each 3e-6."""
    count, bins = 160, 8
    logits = torch.zeros(LARGE_VOCAB)
    logits[0] = math.log(LARGE_VOCAB - 1)
    drawn = draw(logits, count)
    rare = np.histogram(drawn[drawn > 0], bins=bins, range=(1, LARGE_VOCAB))[0]
    counts = np.array([np.sum(drawn == 0), *rare])
    assert_chi_square(counts, np.array([0.5, *[0.5 / bins] * bins]))


@pytest.mark.spec("SMP-2")
def test_the_largest_noise_is_finely_resolved() -> None:
    """The best of V values follows its law and takes many values: V * min(E) is exponential."""
    keys = row_keys(np.full(200, 3, np.uint64), np.arange(200))
    best = torch.cat([gumbel_noise(k, LARGE_VOCAB).amax(-1) for k in torch.tensor(keys).split(8)])
    uniform = np.exp(-LARGE_VOCAB * np.exp(-best.double().numpy()))
    assert_chi_square(np.histogram(uniform, bins=10, range=(0, 1))[0], np.full(10, 0.1))
    assert len(best.unique()) > 190
