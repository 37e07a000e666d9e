"""What is reported of raw logits, and what changes them: penalties and bans."""

import json
import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch
from sampling import random_logits, sample

from nanovllm.layers.sampler import RowSampling
from nanovllm.sampling_params import SamplingParams


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
