"""The sampler, row by row: greedy, its mates in the batch, bad rows, its input."""

import warnings

import pytest
import torch
from sampling import DTYPES, drawn_ids, random_logits, sample

from nanovllm.layers import sampler as sampler_module
from nanovllm.layers.sampler import RowSampling, Sampler, SamplerOutput, SamplingInput
from nanovllm.sampling_params import SamplingParams

# --- greedy and tiny temperatures (SMP-1, SMP-2) ---


@pytest.mark.spec("SMP-1")
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_argmax_with_the_lowest_id_on_ties(dtype: torch.dtype) -> None:
    logits = random_logits(6, 1000).to(dtype)
    logits[:, [17, 300, 999]] = 50.0
    logits[3, 2] = 51.0
    output = sample(logits, [RowSampling(SamplingParams(temperature=0), 0, 0)] * 6)
    assert output == SamplerOutput([17, 17, 17, 2, 17, 17], (), [None] * 6)


@pytest.mark.spec("SMP-6")
def test_the_token_0_has_log_probabilities_too() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0]])
    output = sample(logits, [RowSampling(SamplingParams(temperature=0, logprobs=2), 0, 0)])
    assert [token_id for token_id, _ in output.logprobs[0]] == [0, 2]


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
