"""Stories of the core door: as JSON, in words, lived through again, made small."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bent_door import bent, reference

from nanovllm.conformance.machine import perform
from nanovllm.conformance.operations import Add, Commit, Schedule
from nanovllm.conformance.panel import Panel
from nanovllm.conformance.protocol import RequestOptions, World
from nanovllm.conformance.runner import CORE_REQUIREMENTS, PROFILES, run_core
from nanovllm.conformance.session import Session
from nanovllm.conformance.trace import corpus, read, replay, replay_all, story, trace_of
from nanovllm.conformance.verdicts import Outcome, Verdict

WORLD = World(2, 3, eos_token_ids=(0,))


def live(*operations: Any) -> Session:
    door = reference()
    hello = door.hello()
    session = Session(door, hello, WORLD, Panel(hello.capabilities))
    perform(session, operations)
    return session


def test_a_story_in_plain_words() -> None:
    options = RequestOptions(salt="red", ignore_eos=True)
    session = live(
        Add(0, (1, 1, 2), 2, options, forced={1: 2, 2: 0}),
        Add(1, (), 1),
        Schedule(),
        Commit(0),
        Schedule(),
    )
    assert story(trace_of(session)) == [
        "3 blocks of 2 tokens, 4 seats, 64 tokens a step",
        "add r0 [1, 1, 2] max_tokens=2 salt=red ignore_eos=True, output 1 is 2, output 2 is 0",
        "add r1 [] max_tokens=1 -> refused: the prompt is empty: it has 0 tokens",
        "schedule -> r0[0:3] table (0, 1)",
        "commit r0 draws 2",
        "schedule -> r0[3:4] table (0, 1)",
        "commit r0 draws 0; ended: r0 (length)",
    ]


def test_a_trace_is_json_and_comes_back() -> None:
    trace = trace_of(live(Add(0, (1, 2, 1), 3, seed=1), Schedule(), Commit(0)))
    again = json.loads(json.dumps(trace))
    world, operations = read(again)
    assert world == WORLD
    assert [type(operation) for operation in operations[:3]] == [Add, Schedule, Commit]
    assert story(again) == story(trace)
    door = reference()
    session = Session(door, door.hello(), world, Panel(door.hello().capabilities))
    perform(session, operations)
    assert trace_of(session) == trace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9}, "schema 9"),
        ({"world": {}}, "world"),
        ({"operations": [{"op": "dance"}]}, "no operation 'dance'"),
        ({"operations": [{"op": "add", "request": 0}]}, "missing: max_tokens, prompt"),
    ],
)
def test_what_is_no_trace_says_why(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(trace_of(live()) | change)


def test_the_corpus_is_right_for_the_reference() -> None:
    traces = corpus()
    assert len(traces) >= 20
    for name, trace in traces.items():
        verdicts = replay_all(trace, reference())
        assert [v for v in verdicts if v.outcome is not Outcome.PASS] == [], name


def test_a_trace_without_a_violation_needs_a_requirement() -> None:
    trace = trace_of(live(Add(0, (1, 2), 1)))
    with pytest.raises(ValueError, match="say which requirement"):
        replay(trace, reference())
    assert replay(trace, reference(), "SCH-6").outcome is Outcome.PASS
    assert replay(trace, reference(), "SCH-9").outcome is Outcome.NOT_EXERCISED


# ---- the runner --------------------------------------------------------------------------------


def forgets_ends(call: Any) -> Any:
    return [end for end in call() if end.reason != "length"]


def judged(verdicts: list[Verdict]) -> dict[str, Outcome]:
    return {verdict.spec_id: verdict.outcome for verdict in verdicts}


def test_a_failure_has_the_smallest_story_and_a_trace_that_shows_it_again() -> None:
    door = bent(commit=forgets_ends)
    (verdict,) = run_core(lambda: door, profile="dev", seed=0, requirements={"SCH-12b"})
    assert verdict.outcome is Outcome.FAIL
    assert "ended: False" in verdict.message
    assert len(verdict.story) == 4  # the world, add, schedule, commit
    assert verdict.trace is not None
    assert replay(verdict.trace, door).outcome is Outcome.FAIL
    assert replay(verdict.trace, reference()).outcome is Outcome.PASS


def test_the_same_seed_gives_the_same_verdicts() -> None:
    runs = [
        run_core(lambda: bent(commit=forgets_ends), profile="dev", seed=3, requirements={"SCH-12b"})
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_what_is_not_declared_is_unsupported() -> None:
    door = bent(hello=lambda call: _without(call(), "prefix_cache", "abort"))
    verdicts = run_core(
        lambda: door, profile="mutation", requirements={"PFX-6", "SCH-13", "SCH-7b"}
    )
    assert judged(verdicts) == {
        "PFX-6": Outcome.UNSUPPORTED,
        "SCH-13": Outcome.UNSUPPORTED,
        "SCH-7b": Outcome.PASS,
    }
    messages = {verdict.spec_id: verdict.message for verdict in verdicts}
    assert messages["PFX-6"] == "does not declare prefix_cache"


def _without(hello: Any, *names: str) -> Any:
    return type(hello)(
        hello.engine, hello.version, hello.doors, hello.capabilities - set(names), hello.ahead
    )


def test_a_broken_adapter_is_an_error_and_no_failure() -> None:
    def broken(call: Any) -> Any:
        return object()

    door = bent(pool=broken)
    verdicts = run_core(lambda: door, profile="mutation", requirements={"SCH-2", "SCH-6"})
    assert judged(verdicts) == {"SCH-2": Outcome.PASS, "SCH-6": Outcome.PASS}
    door = bent(schedule=broken)
    verdicts = run_core(lambda: door, profile="mutation", requirements={"SCH-2", "SCH-6"})
    assert judged(verdicts) == {"SCH-2": Outcome.ERROR, "SCH-6": Outcome.ERROR}
    assert "AttributeError" in verdicts[0].message


def test_what_nothing_exercised_is_no_pass() -> None:
    door = bent(stats=lambda call: None)
    (verdict,) = run_core(lambda: door, profile="mutation", requirements={"PFX-17"})
    assert (verdict.outcome, verdict.evaluations) == (Outcome.NOT_EXERCISED, 0)


def test_profiles() -> None:
    assert {name: profile.examples for name, profile in PROFILES.items()} == {
        "dev": 30,
        "ci": 100,
        "deep": 5_000,
        "mutation": 30,
    }
    assert len(set(CORE_REQUIREMENTS)) == len(CORE_REQUIREMENTS)
    with pytest.raises(ValueError, match="no profile 'fast'"):
        run_core(reference, profile="fast")
