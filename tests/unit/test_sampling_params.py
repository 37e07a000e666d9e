"""Validation, normalisation, derivation and serialisation of SamplingParams."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, asdict

import numpy as np
import pytest

from nanovllm.sampling_params import SamplingParams

FULL = SamplingParams(
    temperature=0.7,
    max_tokens=None,
    ignore_eos=True,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    seed=2**64 - 1,
    n=3,
    stop=["END", "\n"],
    stop_token_ids=[5, 6],
    include_stop=True,
    min_tokens=4,
    logprobs=0,
)


@pytest.mark.spec("API-7")
def test_nano_vllm_call_and_defaults() -> None:
    params = SamplingParams(temperature=0.6, max_tokens=256, ignore_eos=True)
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.6, 256, True)
    plain = SamplingParams()
    assert (plain.temperature, plain.max_tokens, plain.ignore_eos) == (1.0, 64, False)


@pytest.mark.spec("SCH-7c")
@pytest.mark.parametrize("temperature", [-1e-9, -1.0, math.nan, math.inf, -math.inf])
def test_b63_impossible_temperatures(temperature: float) -> None:
    with pytest.raises(ValueError, match=rf"temperature .*{temperature}"):
        SamplingParams(temperature=temperature)


@pytest.mark.spec("SCH-7b")
@pytest.mark.parametrize("max_tokens", [0, -3, 1.5, 8.0, True, "8", math.nan])
def test_max_tokens_is_an_integer_of_at_least_one(max_tokens: object) -> None:
    with pytest.raises(ValueError, match=f"max_tokens .*{max_tokens}"):
        SamplingParams(max_tokens=max_tokens)


@pytest.mark.spec("STP-2")
def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens 5 exceeds max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


@pytest.mark.spec("SCH-7c")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("n", 0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [3, -1]),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    shown = value[1] if isinstance(value, list) else value
    assert name in str(error.value)
    assert repr(shown) in str(error.value)


@pytest.mark.spec("SCH-7c")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", 1.0),
        ("n", True),
        ("seed", 1.5),
        ("logprobs", "5"),
        ("ignore_eos", 1),
        ("include_stop", None),
        ("stop", 5),
        ("stop", None),
        ("stop", [1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.0]),
    ],
)
def test_wrong_types_are_named(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.spec("SCH-7c")
def test_values_are_stored_as_plain_python() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=np.int64(7),
        seed=np.uint64(9),
        stop="x",
        stop_token_ids=np.array([1, 2]),
    )
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 7, 9)
    assert {type(params.temperature), type(params.max_tokens), type(params.seed)} == {float, int}
    assert (params.stop, params.stop_token_ids) == (("x",), (1, 2))
    assert SamplingParams(top_k=-1).top_k == -1
    with pytest.raises(FrozenInstanceError):
        params.temperature = 0.1


@pytest.mark.spec("STP-2", "SEQ-6")
@pytest.mark.parametrize(
    "round_trip",
    [
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: SamplingParams(**asdict(p)),
        lambda p: SamplingParams(**json.loads(json.dumps(asdict(p)))),
        copy.deepcopy,
    ],
    ids=["pickle", "asdict", "json", "deepcopy"],
)
def test_b82_nothing_is_lost_on_the_way_to_a_worker(round_trip) -> None:
    assert round_trip(FULL) == FULL
    assert hash(round_trip(FULL)) == hash(FULL)


@pytest.mark.spec("FRK-1")
def test_samples_have_derived_seeds() -> None:
    samples = [FULL.derive(i) for i in range(3)]
    assert samples[0] == SamplingParams(**(asdict(FULL) | {"n": 1}))
    assert [s.n for s in samples] == [1, 1, 1]
    assert len({s.seed for s in samples}) == 3
    assert samples == [FULL.derive(i) for i in range(3)]
    assert {SamplingParams(seed=s, n=2).derive(1).seed for s in range(100)}.isdisjoint(range(101))


@pytest.mark.spec("FRK-1")
def test_samples_without_a_seed() -> None:
    assert SamplingParams(n=2).derive(1) == SamplingParams()
    for index in (-1, 2):
        with pytest.raises(ValueError, match=rf"{index} outside 0\.\.1"):
            SamplingParams(n=2).derive(index)


@pytest.mark.spec("SCH-12a", "SCH-12c")
def test_end_token_ids() -> None:
    params = SamplingParams(stop_token_ids=[3])
    assert params.end_token_ids([1, 2]) == {1, 2, 3}
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).end_token_ids([1, 2]) == {3}
