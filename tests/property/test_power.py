"""The suite convicts planted faults on their own requirement, and no legal engine.

A few seconds of what `scripts/conformance_power.py` measures over all faults and many seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.conformance import power
from nanovllm.conformance.faults import FAULTS
from nanovllm.conformance.variants import VARIANTS

TESTS = Path(__file__).parents[1]

HANDFUL = [
    "second-holder-is-not-counted",
    "refusal-keeps-its-hits",
    "samples-share-the-partial-block",
    "stale-entry-and-own-tokens",
    "allocation-publishes",
    "lost-twin-hides-the-other",
    "only-prompts-are-published",
    "seats-of-one-step",
    "nobody-gives-way",
    "victim-keeps-its-row",
    "outputs-are-forgotten",
    "abort-leaks-blocks",
    "next-chunk-leaves-one-out",
]


@pytest.mark.parametrize("name", HANDFUL)
def test_the_state_machine_convicts_a_fault_on_its_own_requirement(name: str) -> None:
    fault = FAULTS[name]
    found = power.machine_findings(fault, "dev", 0, {fault.convicts})
    assert [finding.spec_id for finding in found] == [fault.convicts]


@pytest.mark.parametrize("name", VARIANTS)
def test_no_legal_variant_is_convicted(name: str) -> None:
    assert power.machine_findings(VARIANTS[name], "dev", 1) == []
    assert power.scenario_findings(VARIANTS[name]) == []


def test_unit_tests_convict_a_fault_that_no_door_shows() -> None:
    trial = power.try_fault(FAULTS["last-block-is-empty"], profile="dev", seed=0, tests=TESTS)
    assert trial.by == ("unit tests",)


def test_a_trial_says_who_convicts_a_fault_and_in_how_many_operations() -> None:
    trial = power.try_fault(FAULTS["idle-is-an-assertion"], profile="dev", seed=0, tests=TESTS)
    assert trial.by == ("scenarios", "machine")
    assert trial.own is not None
    assert trial.own.operations <= 2
    assert trial.others == ("SCH-6",)
