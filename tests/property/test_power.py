"""The suite convicts every planted fault on its own requirement, and no legal engine.

What `scripts/conformance_power.py` measures over many seeds, once: the examples of the profile `ci`
are the same in every run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nanovllm.conformance import power
from nanovllm.conformance.faults import FAULTS
from nanovllm.conformance.variants import VARIANTS

TESTS = Path(__file__).parents[1]
UNIT = [fault for fault in FAULTS.values() if fault.door == "unit"]


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault not in UNIT])
def test_a_run_convicts_a_fault_on_its_own_requirement(name: str) -> None:
    assert power.is_convicted(FAULTS[name], "ci", 0)


def test_unit_tests_convict_the_faults_that_no_door_shows() -> None:
    convicted = power.unit_test_convictions(UNIT, TESTS)
    assert [fault.name for fault in UNIT if fault.name not in convicted] == []


@pytest.mark.parametrize("name", VARIANTS)
def test_no_legal_variant_is_convicted(name: str) -> None:
    assert power.machine_findings(VARIANTS[name], "ci", 1) == []
    assert power.scenario_findings(VARIANTS[name]) == []


@pytest.mark.parametrize("name", ["second-holder-is-not-counted", "lost-twin-hides-the-other"])
def test_the_state_machine_alone_draws_a_fault(name: str) -> None:
    assert all(power.is_drawn(FAULTS[name], "ci", seed) for seed in range(3))


def test_the_reference_reaches_every_situation() -> None:
    events = power.reach("ci", 0)
    assert [name for name in power.SITUATIONS if not events[name]] == []


def test_a_trial_says_who_convicts_a_fault_and_in_how_many_operations() -> None:
    fault = FAULTS["idle-is-an-assertion"]
    trial = power.try_fault(fault, profile="dev", seed=0, tests=TESTS)
    assert trial.by == ("scenarios", "machine")
    assert trial.own is not None
    assert trial.own.operations <= 2


def test_what_a_fault_breaks_besides_is_told() -> None:
    also = power.also_convicted(FAULTS["only-prompts-are-published"], "dev", 0)
    assert also & {"PFX-11", "PFX-15"}
    assert not also & power.needed("PFX-16")
