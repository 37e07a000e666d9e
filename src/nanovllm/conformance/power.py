"""What the suite can see: planted faults before it, and legal variants it must not convict."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.examination import Example, examine
from nanovllm.conformance.faults import FAULTS, Fault
from nanovllm.conformance.planting import Planting
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.runner import PROFILES, drawn, run_core
from nanovllm.conformance.scenarios import SCENARIOS, run_scenario
from nanovllm.conformance.spec_lint import namings_in
from nanovllm.conformance.transport import local_door
from nanovllm.conformance.verdicts import Outcome, Violation

DOORS: Mapping[str, tuple[str, ...]] = {
    "core": ("core", "blocks"),
    "blocks": ("blocks",),
    "engine": ("engine",),
}
"""Doors at which a planting of this door is to be looked at."""

_UNDER_A_FAULT = """
import sys, pytest
from nanovllm.conformance.faults import FAULTS
with FAULTS[sys.argv[1]].make():
    sys.exit(pytest.main(sys.argv[2:]))
"""


HARNESS = "harness"
"""Stands for a requirement where the suite itself broke: no conviction, and no acquittal."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A requirement that was violated, in a story of so many operations."""

    spec_id: str
    operations: int
    message: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault before all that can see it, the state machine with one seed.

    Attributes:
        own: the shortest story that convicts it on its own requirement, if any does.
        others: requirements that convict it too.
        by: which parts convict it on its own: `scenarios`, `machine`, `unit tests`.
        seconds: until the state machine, looking for nothing else, has convicted it.
    """

    fault: str
    convicts: str
    own: Finding | None
    others: tuple[str, ...]
    by: tuple[str, ...]
    seconds: float


def try_fault(fault: Fault, *, profile: str, seed: int, tests: Path) -> Trial:
    """Everything once; `tests` is the folder of the suite's own unit tests.

    Raises:
        RuntimeError: unit tests could not be run.
    """
    if fault.door == "unit":
        return _try_unit_tests(fault, tests)
    found = {"scenarios": scenario_findings(fault)}
    begin = time.perf_counter()
    if fault.door == "core":
        found["machine"] = machine_findings(fault, profile, seed, {fault.convicts})
    seconds = time.perf_counter() - begin
    if fault.door == "core":
        found["machine"] += machine_findings(fault, profile, seed)
    own = {
        part: min((f for f in fs if f.spec_id == fault.convicts), key=lambda f: f.operations)
        for part, fs in found.items()
        if any(f.spec_id == fault.convicts for f in fs)
    }
    others = {f.spec_id for fs in found.values() for f in fs} - {fault.convicts}
    return Trial(
        fault.name,
        fault.convicts,
        min(own.values(), key=lambda f: f.operations, default=None),
        tuple(sorted(others)),
        tuple(own),
        seconds,
    )


def scenario_findings(planting: Planting) -> list[Finding]:
    """Scenarios always run the same; a deviation from a `should` is not found here."""
    found = []
    for scenario in SCENARIOS:
        if scenario.door not in DOORS[planting.door] or scenario.level != "must":
            continue
        with planting.make() as door:
            result = run_scenario(scenario, door)
        if result.error:
            found.append(Finding(HARNESS, 0, f"{scenario.name}: {result.error}"))
        if result.violation:
            found.append(_finding(result.violation, len(result.story)))
    return [finding for finding in found if _is_must(finding.spec_id)]


def machine_findings(
    planting: Planting, profile: str, seed: int, requirements: Collection[str] | None = None
) -> list[Finding]:
    """What the corpus and the state machine find at the core door."""
    verdicts = run_core(planting.make, profile=profile, seed=seed, requirements=requirements)
    errors = {verdict.message for verdict in verdicts if verdict.outcome is Outcome.ERROR}
    return [
        # Its first line is the world.
        Finding(verdict.spec_id, len(verdict.story) - 1, verdict.message)
        for verdict in verdicts
        if verdict.outcome is Outcome.FAIL and _is_must(verdict.spec_id)
    ] + [Finding(HARNESS, 0, error) for error in sorted(errors)]


def _finding(violation: Violation, story: int) -> Finding:
    return Finding(violation.spec_id, max(1, story - 1), violation.message)


@cache
def _musts() -> frozenset[str]:
    return frozenset(r.id for r in load_registry().values() if r.level == "must")


def _is_must(spec_id: str) -> bool:
    return spec_id == HARNESS or spec_id in _musts()


def _try_unit_tests(fault: Fault, tests: Path) -> Trial:
    """Whether the tests that name its requirement fail with the fault planted in their process."""
    named = dict.fromkeys(n.test for n in namings_in(tests) if n.spec_id == fault.convicts)
    nodes = [test for test in named if test.startswith(f"{tests.name}/unit/")]
    if not nodes:
        raise RuntimeError(f"{fault.name}: no unit test names {fault.convicts}")
    quiet = ["-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", _UNDER_A_FAULT, fault.name, *quiet, *nodes]
    begin = time.perf_counter()
    run = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{fault.name}: pytest ended by {run.returncode}: {run.stdout[-500:]}")
    seconds = time.perf_counter() - begin
    convicted = run.returncode == 1
    own = Finding(fault.convicts, 1, run.stdout[-200:]) if convicted else None
    by = ("unit tests",) if convicted else ()
    return Trial(fault.name, fault.convicts, own, (), by, seconds)


def reach(profile: str, seed: int) -> Counter[str]:
    """Situation -> number of the profile's examples that bring the reference to it."""
    door = local_door(ReferenceCore())
    hello = door.hello()
    examples: Sequence[Example] = [
        drawn(hello, seed, i, {}) for i in range(PROFILES[profile].examples)
    ]
    return examine(door, hello, examples).events


def without_fault() -> dict[str, str]:
    """Musts of the groups that are planted in, and have no fault: id -> why."""
    groups = {"SEQ", "BLK", "PFX", "SCH", "FRK", "KV", "SMP", "STP"}
    planted = {fault.convicts for fault in FAULTS.values()}
    return {
        requirement.id: requirement.title
        for requirement in load_registry().values()
        if requirement.group in groups
        and requirement.level == "must"
        and requirement.id not in planted
    }
