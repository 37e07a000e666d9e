"""The sampler: greedy, its random numbers, filters, penalties, log probabilities, bad rows.

Statistical tests are chi-square tests at ALPHA with fixed seeds: they give the same verdict on
every run.
"""

import json
import math
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from statistics import NormalDist

import numpy as np
import pytest
import torch

from nanovllm.kernels.gumbel_noise import gumbel_noise, row_keys
from nanovllm.layers import sampler as sampler_module
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


# --- greedy and tiny temperatures (SMP-1, SMP-2) ---


@pytest.mark.spec("SMP-1")
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_argmax_with_the_lowest_id_on_ties(dtype: torch.dtype) -> None:
    logits = random_logits(6, 1000).to(dtype)
    logits[:, [17, 300, 999]] = 50.0
    logits[3, 2] = 51.0
    output = sample(logits, [RowSampling(SamplingParams(temperature=0), 0, 0)] * 6)
    assert output == SamplerOutput([17, 17, 17, 2, 17, 17], (), [None] * 6)


@pytest.mark.spec("SMP-1", "SMP-2")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 1.2e-38, 1e-8, 1e-5, 1e-4])
@pytest.mark.parametrize("gap", [1.0, 0.25])
def test_b63_tiny_temperatures_equal_argmax(
    dtype: torch.dtype, temperature: float, gap: float
) -> None:
    logits = torch.linspace(-50, 49, 64, dtype=dtype).repeat(64, 1)
    best = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(64), best] = logits.max() + gap
    params = SamplingParams(temperature=temperature)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = sample(logits, [RowSampling(params, i, i) for i in range(64)])
    assert output.token_ids == best.tolist()
    assert output.failed == ()


@pytest.mark.spec("SMP-1", "SMP-4")
def test_b64_a_greedy_row_with_impossible_tokens_does_not_poison_its_mates() -> None:
    logits = random_logits(2, 64)
    logits[0, ::2] = -torch.inf
    greedy = RowSampling(SamplingParams(temperature=0), 0, 0)
    for position in range(50):
        sampled = RowSampling(SamplingParams(temperature=0.8), 7, position)
        output = sample(logits, [greedy, sampled])
        assert output.token_ids[0] == 1 + 2 * int(logits[0, 1::2].argmax())
        assert output.token_ids[1:] == sample(logits[1:], [sampled]).token_ids
        assert output.failed == ()


@pytest.mark.spec("SMP-2")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e30])
def test_impossible_tokens_are_never_drawn(temperature: float) -> None:
    logits = torch.full((100,), -torch.inf)
    logits[[3, 50, 99]] = torch.tensor([0.0, 0.1, -0.1])
    assert drawn_ids(logits, temperature=temperature) == {3, 50, 99}


# --- the distribution (SMP-2) ---


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
    count, bins = 320, 10
    logits = torch.zeros(LARGE_VOCAB)
    logits[0] = math.log(LARGE_VOCAB - 1)
    drawn = draw(logits, count)
    rare = np.histogram(drawn[drawn > 0], bins=bins, range=(1, LARGE_VOCAB))[0]
    counts = np.array([np.sum(drawn == 0), *rare])
    assert_chi_square(counts, np.array([0.5, *[0.5 / bins] * bins]))


@pytest.mark.spec("SMP-2")
def test_the_largest_noise_is_finely_resolved() -> None:
    """The best of V values follows its law and takes many values: V * min(E) is exponential."""
    keys = row_keys(np.full(400, 3, np.uint64), np.arange(400))
    best = torch.cat([gumbel_noise(k, LARGE_VOCAB).amax(-1) for k in torch.tensor(keys).split(8)])
    uniform = np.exp(-LARGE_VOCAB * np.exp(-best.double().numpy()))
    assert_chi_square(np.histogram(uniform, bins=10, range=(0, 1))[0], np.full(10, 0.1))
    assert len(best.unique()) > 380


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


# --- independence of the batch (SMP-4) ---


@pytest.mark.spec("SMP-4")
def test_b70_a_seeded_row_ignores_its_neighbours() -> None:
    """The same 40 tokens alone, first, last and twice in a batch of seeded, greedy, filtered."""
    steps = random_logits(40, 500, seed=1)
    mates = [
        RowSampling(SamplingParams(temperature=0.8), 7, 3),
        RowSampling(SamplingParams(temperature=0), 0, 9),
        RowSampling(SamplingParams(top_k=5, top_p=0.5, min_p=0.1, logprobs=3), 42, 11),
        RowSampling(
            SamplingParams(repetition_penalty=1.5), 8, 2, [1, 2], [3], banned_token_ids=[4]
        ),
    ]
    params = SamplingParams(temperature=0.8)
    alone, batched = [], []
    for position, logits in enumerate(steps):
        row = RowSampling(params, 42, position)
        alone += sample(logits[None], [row]).token_ids
        batch = [row, *mates, row]
        drawn = sample(logits.repeat(len(batch), 1), batch).token_ids
        batched += [(drawn[0], drawn[-1])]
    assert batched == [(token_id, token_id) for token_id in alone]
    assert len(set(alone)) > 10


@pytest.mark.spec("SMP-4")
def test_rows_of_several_chunks_draw_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(11, 97, seed=2)
    rows = [
        RowSampling(SamplingParams(temperature=i % 3, top_k=i, logprobs=2), i, i) for i in range(11)
    ]
    whole = sample(logits, rows)
    monkeypatch.setattr(sampler_module, "_CHUNK_ELEMENTS", 2 * 97)
    chunked = sample(logits, rows)
    assert chunked == whole
    assert whole.token_ids == [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(11)]


@pytest.mark.spec("SMP-4")
def test_noise_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, 1000)
    rows = [(seed, position) for seed in (0, 1, 2**40, 2**63) for position in (0, 1, 2, 2**20)]
    drawn = [sample(logits, [RowSampling(SamplingParams(), *where)]).token_ids[0] for where in rows]
    assert len(set(drawn)) >= 15


# --- filters (SMP-3) ---


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


# --- failing rows (SMP-5) ---


@pytest.mark.spec("SMP-5")
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_a_maximum_fails_alone(temperature: float, dtype: torch.dtype) -> None:
    logits = random_logits(6, 50).to(dtype)
    logits[1, 30] = torch.nan
    logits[2] = -torch.inf
    logits[4, 0] = torch.inf
    params = SamplingParams(temperature=temperature, logprobs=1, top_k=9, top_p=0.9, min_p=0.01)
    rows = [RowSampling(params, i, i) for i in range(6)]
    output = sample(logits, rows)
    assert output.failed == (1, 2, 4)
    for i in range(6):
        if i in output.failed:
            assert output.token_ids[i] == -1
            assert output.logprobs[i] is None
        else:
            alone = sample(logits[i : i + 1], [rows[i]])
            assert output.token_ids[i] == alone.token_ids[0]
            assert output.logprobs[i] is not None


@pytest.mark.spec("SMP-5", "STP-2")
def test_a_ban_does_not_hide_nan_and_may_leave_nothing() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2] = torch.nan
    rows = [
        RowSampling(SamplingParams(), 0, 0, banned_token_ids=[2]),
        RowSampling(SamplingParams(), 0, 0, banned_token_ids=range(4)),
        RowSampling(SamplingParams(), 0, 0, banned_token_ids=[0, 1, 3]),
    ]
    output = sample(logits, rows)
    assert output.failed == (0, 1)
    assert output.token_ids == [-1, -1, 2]


# --- log probabilities (SMP-6) ---


@pytest.mark.spec("SMP-6")
def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Whatever else the rows ask for; only where asked, the drawn token first, no id twice."""
    logits = random_logits(5, 60, seed=3)
    rows = [
        RowSampling(SamplingParams(temperature=0, logprobs=3), 0, 0),
        RowSampling(SamplingParams(), 0, 0),
        RowSampling(SamplingParams(temperature=5.0, logprobs=0), 1, 0),
        RowSampling(
            SamplingParams(logprobs=5, temperature=3.0, top_k=40, repetition_penalty=2.0),
            2,
            0,
            range(30),
            banned_token_ids=[31],
        ),
        RowSampling(SamplingParams(logprobs=10**6), 3, 0),
    ]
    output = sample(logits, rows)
    exact = logits.double().log_softmax(-1)
    assert [entry and len(entry) for entry in output.logprobs][:3] == [3, None, 1]
    for i in (0, 2, 3, 4):
        ids, values = zip(*output.logprobs[i], strict=True)
        assert ids[0] == output.token_ids[i]
        best = [t for t in exact[i].argsort(descending=True).tolist() if t != ids[0]]
        assert list(ids[1:]) == best[: len(ids) - 1]
        np.testing.assert_allclose(values, exact[i, list(ids)], rtol=0, atol=1e-4)
    assert len(output.logprobs[3]) in (5, 6)
    assert len(output.logprobs[4]) == 60


# --- penalties (SMP-7) and bans (STP-2) ---


@pytest.mark.spec("SMP-7")
def test_penalties_follow_their_definition() -> None:
    """Greedy and sampled choices equal those from logits penalised token by token."""
    rng = np.random.default_rng(8)
    logits = random_logits(20, 30, seed=4)
    penalised, rows = logits.clone(), []
    for i in range(20):
        prompt, output = rng.integers(0, 30, 6).tolist(), rng.integers(0, 30, i % 8).tolist()
        params = SamplingParams(
            temperature=i % 2,
            repetition_penalty=rng.choice([1.0, 0.7, 1.8]),
            presence_penalty=rng.choice([0.0, 1.5, -1.0]),
            frequency_penalty=rng.choice([0.0, 0.9]),
        )
        rows.append(RowSampling(params, i, i, prompt, output))
        for token_id in {*prompt, *output}:
            factor = params.repetition_penalty
            value = penalised[i, token_id]
            penalised[i, token_id] = value / factor if value > 0 else value * factor
        for token_id in set(output):
            penalised[i, token_id] -= params.presence_penalty
            penalised[i, token_id] -= params.frequency_penalty * output.count(token_id)
    plain = [RowSampling(SamplingParams(temperature=i % 2), i, i) for i in range(20)]
    expected = sample(penalised, plain).token_ids
    assert sample(logits, rows).token_ids == expected
    assert sample(logits, plain).token_ids != expected


@pytest.mark.spec("SMP-7")
def test_presence_and_frequency_ignore_the_prompt() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]])
    for params, output, expected in [
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, [], 1),
        ({"presence_penalty": 0.4}, [1, 1, 1], 1),
        ({"presence_penalty": 0.6}, [1], 2),
        ({"frequency_penalty": 0.2}, [1, 1], 1),
        ({"frequency_penalty": 0.2}, [1, 1, 1], 2),
        ({"repetition_penalty": 1.9}, [0], 1),
        ({"repetition_penalty": 2.1}, [0], 2),
    ]:
        row = RowSampling(SamplingParams(temperature=0, **params), 0, 0, [1, 1, 1, 1], output)
        assert sample(logits, [row]).token_ids == [expected]


@pytest.mark.spec("STP-2")
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    "copy",
    [
        lambda params: pickle.loads(pickle.dumps(params)),
        lambda params: SamplingParams(**json.loads(json.dumps(asdict(params)))),
    ],
    ids=["pickle", "json"],
)
def test_b82_ids_that_end_are_masked_before_min_tokens(copy, min_tokens, temperature) -> None:
    """The model always wants eos 9, then eos 8, then stop id 7."""
    logits = torch.full((1, 10), -5.0)
    logits[0, [7, 8, 9]] = torch.tensor([38.0, 39.0, 60.0])
    params = copy(
        SamplingParams(temperature=temperature, min_tokens=min_tokens, stop_token_ids=[7])
    )
    end = params.end_token_ids([8, 9])
    output: list[int] = []
    while not end.intersection(output) and len(output) < 10:
        banned = end if len(output) < params.min_tokens else ()
        row = RowSampling(params, 1, 20 + len(output), [1], output, banned)
        output += sample(logits, [row]).token_ids
    assert len(output) == min_tokens + 1
    assert output[-1] == 9


# --- the input (MOD-3) ---


@pytest.mark.spec("MOD-3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_k": 3, "top_p": 0.8, "min_p": 0.1},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 4},
    ],
)
def test_logits_are_not_modified(dtype: torch.dtype, params: dict[str, float]) -> None:
    logits = random_logits(4, 33).to(dtype)
    before = logits.clone()
    row = RowSampling(SamplingParams(**params), 1, 2, [1, 2], [3], [4])
    sample(logits, [row] * 3 + [RowSampling(SamplingParams(), 0, 0)])
    assert torch.equal(logits, before)


@pytest.mark.spec("SMP-1")
def test_plain_rows_carry_no_extras() -> None:
    inp = SamplingInput.from_rows([RowSampling(SamplingParams(), 2**64 - 1, 5, [1], [2])] * 3)
    assert (inp.processors, inp.logprobs) == ((), ())
    assert inp.seed.tolist() == [2**64 - 1] * 3
    with pytest.raises(ValueError, match=r"\(2, 7\) for 3 rows"):
        Sampler()(torch.zeros(2, 7), inp)
    empty = Sampler()(torch.zeros(0, 7), SamplingInput.from_rows([]))
    assert empty == SamplerOutput([], (), [])
