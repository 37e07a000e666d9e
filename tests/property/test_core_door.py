"""The reference at the core door: every requirement holds, and every one is put to the test."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from ahead_engine import AheadCore
from bent_door import reference

from nanovllm.conformance.checks import CHECKS
from nanovllm.conformance.examination import Example, examine
from nanovllm.conformance.panel import Panel
from nanovllm.conformance.power import SITUATIONS
from nanovllm.conformance.protocol import Plan, World
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.runner import PROFILES, drawn, run_core
from nanovllm.conformance.scenarios import SCENARIOS
from nanovllm.conformance.session import Session
from nanovllm.conformance.trace import example_of, trace_of
from nanovllm.conformance.transport import local_door
from nanovllm.conformance.verdicts import Outcome, Verdict

ALL_IDS = tuple(dict.fromkeys(check.spec_id for check in CHECKS))


def profile() -> str:
    """`NANOVLLM_PROFILE` chooses; a name that this machine does not have is `ci`."""
    name = os.environ.get("NANOVLLM_PROFILE", "ci")
    return name if name in PROFILES else "ci"


def not_passed(verdicts: list[Verdict]) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    return {
        v.spec_id: (v.outcome, v.message, v.story)
        for v in verdicts
        if v.outcome is not Outcome.PASS
    }


@pytest.mark.spec(*ALL_IDS)
def test_the_reference_passes_and_every_check_is_exercised() -> None:
    verdicts = run_core(reference, profile=profile())
    assert not_passed(verdicts) == {}
    assert [verdict.spec_id for verdict in verdicts] == list(ALL_IDS)


@pytest.mark.spec("SCH-1", "SCH-6", "PFX-9")
@pytest.mark.parametrize("options", [{"policy": "mixed"}, {"max_consecutive_prefills": 1}])
def test_so_it_does_with_other_policies(options: dict[str, object]) -> None:
    assert not_passed(run_core(reference, profile="dev", seed=1, options=options)) == {}


def test_every_must_of_the_core_door_is_judged_there() -> None:
    """By the machine, or by an exact example."""
    judged = {*ALL_IDS, *(i for s in SCENARIOS if s.door == "core" for i in s.spec_ids)}
    musts = {
        requirement.id
        for requirement in load_registry().values()
        if requirement.level == "must" and requirement.door == "core" and not requirement.ref_only
    }
    assert musts - judged == set()


@pytest.mark.spec("SCH-8", "PFX-8", "SCH-14")
def test_examples_reach_every_situation() -> None:
    """A machine that never preempts shows nothing of preemption."""
    door = reference()
    examples = [drawn(door.hello(), 0, i, {}) for i in range(40)]
    reached: Counter[str] = examine(door, door.hello(), examples, {"SCH-6"}).events
    assert {name: reached[name] for name in SITUATIONS if reached[name] < 4} == {}, reached


@pytest.mark.spec("SCH-6", "BLK-4", "BLK-6", "SCH-13")
def test_an_engine_that_plans_one_step_ahead_passes() -> None:
    engine = Counting()
    verdicts = run_core(lambda: local_door(engine), profile="ci", seed=0)
    wrong = not_passed(verdicts)
    assert {i: told for i, told in wrong.items() if told[0] is not Outcome.UNSUPPORTED} == {}
    assert sum(verdict.outcome is Outcome.PASS for verdict in verdicts) > 20
    assert engine.num_ahead > 100
    assert engine.num_discarded_in_all >= 5


class Counting(AheadCore):
    """Counts the plans made ahead, and the rows that an end has made needless."""

    num_ahead = 0
    num_discarded_in_all = 0

    def schedule(self) -> Plan:
        self.num_ahead += any(self.flights.values())
        return super().schedule()

    def reset(self, world: World) -> None:
        self.num_discarded_in_all += getattr(self, "num_discarded", 0)
        super().reset(world)


def live(example: Example) -> dict[str, Any]:
    door = reference()
    hello = door.hello()
    session = Session(door, hello, example.world, Panel(hello.capabilities))
    example.play(session)
    return trace_of(session)


@pytest.mark.parametrize("index", range(10))
def test_a_story_lived_through_again_is_the_same(index: int) -> None:
    """Drawn again, and replayed, which ends with a drain of its own."""
    example = drawn(reference().hello(), 5, index, {})
    trace = live(example)
    assert live(example) == trace
    again = live(example_of(trace))
    assert again["operations"][: len(trace["operations"])] == trace["operations"]
