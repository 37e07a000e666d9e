"""Stories of requests, and their replay by an engine."""

from typing import NamedTuple

from ahead_or_not import ALPHABET, KINDS
from hypothesis import settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

MORE_KINDS = [*KINDS, {"stop_token_ids": tuple(range(120))}]


class Add(NamedTuple):
    prompt: str
    params: SamplingParams


class Steps(NamedTuple):
    count: int


class Abort(NamedTuple):
    """The request that came this many before the last; steps may be in flight."""

    age: int


class Fail(NamedTuple):
    """The next step fails: when it is launched, or when its tokens are asked for."""

    at_launch: bool


Event = Add | Steps | Abort | Fail


@st.composite
def additions(draw: st.DrawFn) -> Add:
    """Of all kinds."""
    values = {"temperature": 2.0, **draw(st.sampled_from(MORE_KINDS))}
    return Add(
        draw(st.text(ALPHABET, min_size=1, max_size=14)),
        SamplingParams(
            seed=draw(st.integers(0, 99)), max_tokens=draw(st.sampled_from([1, 3, 6, 17])), **values
        ),
    )


@st.composite
def long_ones(draw: st.DrawFn) -> Add:
    """Which fill a small pool, so that somebody has to leave."""
    return Add(
        draw(st.text(ALPHABET, min_size=3, max_size=6)),
        SamplingParams(
            temperature=1.0,
            seed=draw(st.integers(0, 99)),
            max_tokens=draw(st.sampled_from([6, 10, 14])),
            ignore_eos=True,
            n=draw(st.integers(1, 3)),
        ),
    )


EVENTS: list[st.SearchStrategy[Event]] = [
    additions(),
    long_ones(),
    st.builds(Steps, st.integers(1, 6)),
    st.builds(Abort, st.integers(0, 3)),
]
FAILURES: st.SearchStrategy[Event] = st.builds(Fail, st.booleans())


def stories(*events: st.SearchStrategy[Event]) -> st.SearchStrategy[list[Event]]:
    return st.lists(st.one_of(*events), min_size=4, max_size=16)


def show_all() -> bool:
    """Whether the profile has enough examples for stories to show all that they can be.

    `ci` has, whose examples are always the same, and `deep`, which has far more.
    """
    return settings().max_examples >= 500


class Told(NamedTuple):
    """What an engine told of a story."""

    outputs: list[RequestOutput]
    num_in_flight: int
    num_preemptions: int


def replay(llm: LLM, story: list[Event]) -> Told:
    """Step by step to the end; nothing may be lost. Requests count from 0 on."""
    ids: list[int] = []
    outputs: dict[int, RequestOutput] = {}
    begun: list[int] = []
    num_in_flight, before = 0, llm.stats().num_preemptions
    for happening in [*story, Steps(1000)]:
        match happening:
            case Add(prompt, params):
                ids.append(llm.add_request(prompt, params))
            case Abort(age) if age < len(ids):
                num_in_flight += len(llm.scheduler.in_flight)
                llm.abort_request(ids[-1 - age])
            case Fail(at_launch):
                where = "fail_launch" if at_launch else "fail_result"
                failing = getattr(llm.model_runner, where) | {llm.scheduler.stats.num_steps}
                setattr(llm.model_runner, where, failing)
                num_in_flight += len(llm.scheduler.in_flight)
            case Steps(count):
                for _ in range(count):
                    if llm.is_finished():
                        break
                    step = llm.step()
                    begun += step.first_tokens
                    outputs |= {o.request_id: o for o in step.outputs}
    assert llm.is_finished()
    llm.step()  # what was planned ahead of the last end lands
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert not llm.scheduler.in_flight
    assert sorted(outputs) == ids
    answered = [i for i in ids if any(sample.token_ids for sample in outputs[i].samples)]
    assert sorted(begun) == answered, "each has one first token"
    told = [outputs[request_id] for request_id in ids]
    return Told(told, num_in_flight, stats.num_preemptions - before)
