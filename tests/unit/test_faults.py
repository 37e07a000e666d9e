"""Planted faults and legal variants: each is a door of its own, and leaves the reference alone."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.faults import FAULTS, Fault
from nanovllm.conformance.planting import Planting
from nanovllm.conformance.power import without_fault
from nanovllm.conformance.protocol import RequestId, RequestOptions, World
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.scenarios import SCENARIOS, run_scenario
from nanovllm.conformance.transport import local_door
from nanovllm.conformance.variants import VARIANTS
from nanovllm.engine import scheduler, sequence

WITHOUT_FAULT: dict[str, str] = {}
"""Musts of SEQ, BLK, PFX, SCH, FRK, KV, SMP and STP without a fault, and why."""

PLANTINGS = [*FAULTS.values(), *VARIANTS.values()]


def label(planting: Planting) -> str:
    return planting.name


@pytest.mark.parametrize("fault", FAULTS.values(), ids=label)
def test_a_fault_names_a_must_that_its_door_shows(fault: Fault) -> None:
    requirement = load_registry()[fault.convicts]
    assert requirement.level == "must"
    assert not requirement.pending
    if requirement.ref_only:
        assert fault.door == "unit"
    else:
        assert fault.door in requirement.doors


def test_musts_without_a_fault_have_a_reason() -> None:
    assert without_fault().keys() == WITHOUT_FAULT.keys()
    assert len(FAULTS) >= 60


def test_the_registry_lists_the_faults() -> None:
    planted = defaultdict(list)
    for fault in FAULTS.values():
        planted[fault.convicts].append(fault.name)
    listed = {r.id: list(r.faults) for r in load_registry().values() if r.faults}
    assert listed == planted


@pytest.mark.parametrize("planting", PLANTINGS, ids=label)
def test_a_planting_says_what_it_does(planting: Planting) -> None:
    assert planting.text.endswith(".")
    assert len(planting.text) <= 140


@pytest.mark.parametrize("planting", PLANTINGS, ids=label)
def test_a_planting_makes_a_door_or_a_context(planting: Planting) -> None:
    made = planting.make()
    with made as door:
        if planting.door == "unit":
            return
        hello = door.hello()
        assert planting.door in hello.doors
        if planting.door == "core":
            door.reset(World(4, 8, max_num_seqs=2))
            door.add(0, [1, 2, 3], 2, RequestOptions())


def one_step(door: Any) -> list[str]:
    """Reasons of requests that end in the step after their prompt's; at most one output each."""
    door.reset(World(4, 8))
    door.add(0, [1, 2, 3], 1, RequestOptions())
    plan = door.schedule()
    return [finished.reason for finished in door.commit(plan.step, {RequestId(0): 7})]


def test_a_faulty_engine_runs_beside_the_reference() -> None:
    faulty, right = FAULTS["one-output-too-many"].make(), local_door(ReferenceCore())
    for _ in range(2):
        assert one_step(faulty) == []
        assert one_step(right) == ["length"]


def test_a_call_that_raises_leaves_the_reference_as_it_was() -> None:
    door = FAULTS["asserts-instead-of-refusing"].make()
    door.reset(World(4, 8))
    before = scheduler.Scheduler
    with pytest.raises(Exception, match="AssertionError"):
        door.add(0, [], 1, RequestOptions())
    assert scheduler.Scheduler is before


@pytest.mark.parametrize("name", ["last-block-is-empty", "block-size-of-the-class"])
def test_a_fault_for_unit_tests_changes_the_reference_within_its_context(name: str) -> None:
    fault = FAULTS[name]
    assert sequence.Sequence is fault.original
    with fault.make():
        assert sequence.Sequence is scheduler.Sequence is fault.replacement
    assert sequence.Sequence is scheduler.Sequence is fault.original


SHOWN_BY = {
    "whole-prompt-leaves-nothing": "b12-whole-prompt-in-the-cache",
    "map-only-grows": "b14-map-does-not-grow-with-the-number-of-prompts",
    "block-is-taken-one-token-early": "b06-blocks-at-the-boundary",
    "cached-blocks-are-not-free": "b27-cached-blocks-do-not-block-admission",
    "one-beyond-the-model-length": "b43-total-length-at-max-model-len",
}


@pytest.mark.parametrize("name", SHOWN_BY)
def test_the_case_of_a_public_report_shows_its_fault(name: str) -> None:
    case = next(scenario for scenario in SCENARIOS if scenario.name == SHOWN_BY[name])
    with FAULTS[name].make() as door:
        violation = run_scenario(case, door).violation
    assert violation is not None
    assert violation.spec_id == FAULTS[name].convicts
    with nullcontext(local_door(ReferenceCore())) as door:
        assert run_scenario(case, door).violation is None
