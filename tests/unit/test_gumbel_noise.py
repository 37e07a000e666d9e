"""The noise of one token: a function of seed, position and token id, by its definition."""

import math

import numpy as np
import pytest
import torch
from sampling import sample

from nanovllm.kernels.gumbel_noise import gumbel_noise, row_keys
from nanovllm.layers.sampler import RowSampling
from nanovllm.sampling_params import SamplingParams


def mix64(x: int) -> int:
    """The 64-bit finaliser in plain integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def exact_noise(seed: int, position: int, token_id: int) -> float:
    """The noise of one token with Python's integers and doubles."""
    golden = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + golden) % 2**64) + position * golden) % 2**64)
    x = token_id ^ key % 2**32
    x = (x ^ x >> 17) * 0xED5AD4BB + (key >> 32)
    x %= 2**32
    x = (x ^ x >> 11) * 0xAC4C1B51 % 2**32
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    return gumbel_of(x ^ x >> 14)


def gumbel_of(word: int) -> float:
    uniform = min((word + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


@pytest.mark.spec("SMP-4")
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (2**64 - 1, 7), (42, 40_000)])
def test_noise_equals_its_definition(seed: int, position: int) -> None:
    keys = row_keys(np.array([seed], np.uint64), np.array([position]))
    noise = gumbel_noise(torch.from_numpy(keys), 300)[0].double().numpy()
    expected = np.array([exact_noise(seed, position, token_id) for token_id in range(300)])
    np.testing.assert_allclose(noise, expected, rtol=0, atol=1e-3)
    likely = expected > -1.5  # below it u is so close to 1 that fp32 is coarse, and never wins
    np.testing.assert_allclose(noise[likely], expected[likely], rtol=0, atol=1e-5)


def key_of(word: int) -> int:
    """First key word (the second being 0) under which token 0 hashes to `word`."""
    for shift, factor in [(14, 1), (15, 0x31848BAB), (11, 0xAC4C1B51), (17, 0xED5AD4BB)]:
        mixed = word * pow(factor, -1, 2**32) % 2**32
        word = mixed
        for _ in range(32 // shift):
            word = mixed ^ word >> shift
    return word


@pytest.mark.spec("SMP-2")
def test_noise_at_the_extreme_hashes() -> None:
    words = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    keys = np.array([[key_of(word), 0] for word in words], np.uint32).view(np.int32)
    noise = gumbel_noise(torch.from_numpy(keys), 1).flatten()
    assert noise.isfinite().all()
    np.testing.assert_allclose(noise, [gumbel_of(word) for word in words], rtol=0, atol=1e-2)
    np.testing.assert_allclose(noise[:5], [gumbel_of(word) for word in words[:5]], rtol=1e-6)


@pytest.mark.spec("SMP-4")
def test_noise_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, 1000)
    rows = [(seed, position) for seed in (0, 1, 2**40, 2**63) for position in (0, 1, 2, 2**20)]
    drawn = [sample(logits, [RowSampling(SamplingParams(), *where)]).token_ids[0] for where in rows]
    assert len(set(drawn)) >= 15
