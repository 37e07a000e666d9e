"""Scenarios of the conformance suite at the engine door, on the embedded model."""

from collections.abc import Iterator

import pytest

from nanovllm.conformance.scenarios import SCENARIOS, Scenario, run_scenario
from nanovllm.conformance.transport import OpenDoor, open_door


@pytest.fixture(scope="module")
def door() -> Iterator[OpenDoor]:
    with open_door("reference", transport="in-process") as opened:
        yield opened
        opened.close()


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.spec(*one.spec_ids))
        for one in SCENARIOS
        if one.door == "engine"
    ],
)
def test_the_reference_passes(one: Scenario, door: OpenDoor) -> None:
    result = run_scenario(one, door)
    assert (result.violation, result.error, result.unsupported) == (None, "", ())
    assert set(one.spec_ids) <= result.evaluations.counts.keys()
