"""What the suite can see: planted faults before it, and legal variants it must not convict."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.examination import Example, examine
from nanovllm.conformance.faults import FAULTS, Fault
from nanovllm.conformance.planting import Planting
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.runner import PROFILES, drawn, run_core
from nanovllm.conformance.scenarios import SCENARIOS, Scenario, run_scenario
from nanovllm.conformance.spec_lint import namings_in
from nanovllm.conformance.transport import local_door
from nanovllm.conformance.verdicts import Outcome, Violation

DOORS: Mapping[str, tuple[str, ...]] = {
    "core": ("core", "blocks"),
    "blocks": ("blocks",),
    "engine": ("engine",),
}
"""Doors at which a planting of this door is to be looked at."""

REFERENCE = Planting("reference", "The reference itself.", "core", ReferenceCore, ReferenceCore)

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
        seconds: of processor time for a run that looks for its own requirement alone.
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
    begin = time.process_time()
    own = _findings(fault, profile, seed, {fault.convicts})
    seconds = time.process_time() - begin
    everything = _findings(fault, profile, seed)
    convictions = {
        part: [f for f in (*own[part], *everything[part]) if f.spec_id == fault.convicts]
        for part in own
    }
    every = (finding for findings in convictions.values() for finding in findings)
    others = {f.spec_id for findings in everything.values() for f in findings} - {fault.convicts}
    return Trial(
        fault.name,
        fault.convicts,
        min(every, key=lambda finding: finding.operations, default=None),
        tuple(sorted(others)),
        tuple(part for part, findings in convictions.items() if findings),
        seconds,
    )


def _findings(
    planting: Planting, profile: str, seed: int, requirements: Collection[str] | None = None
) -> dict[str, list[Finding]]:
    """By part; as a run that is asked for these requirements, all if None."""
    found = {"scenarios": scenario_findings(planting, requirements)}
    if planting.door == "core":
        found["machine"] = machine_findings(planting, profile, seed, requirements)
    return found


def scenario_findings(
    planting: Planting, requirements: Collection[str] | None = None
) -> list[Finding]:
    """Scenarios always run the same; a deviation from a `should` is not found here."""
    found = []
    for scenario in _scenarios(planting.door, requirements):
        with planting.make() as door:
            result = run_scenario(scenario, door)
        if result.error:
            found.append(Finding(HARNESS, 0, f"{scenario.name}: {result.error}"))
        if result.violation:
            found.append(_finding(result.violation, len(result.story)))
    return [finding for finding in found if _is_must(finding.spec_id)]


def _scenarios(door: str, requirements: Collection[str] | None) -> Iterable[Scenario]:
    for scenario in SCENARIOS:
        wanted = requirements is None or not set(requirements).isdisjoint(scenario.spec_ids)
        if wanted and scenario.door in DOORS[door] and scenario.level == "must":
            yield scenario


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


def is_drawn(fault: Fault, profile: str, seed: int) -> bool:
    """Whether one of the examples that the state machine draws convicts a fault on its own.

    Checks do not hear of each other, so that one requirement alone is judged as in a whole run;
    and one conviction is enough. Corpus and scenarios are left out: they are the same every time.
    """
    with fault.make() as door:
        hello = door.hello()
        examples = [drawn(hello, seed, i, {}) for i in range(PROFILES[profile].examples)]
        return fault.convicts in examine(door, hello, examples, {fault.convicts}, enough=1).failures


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


def seconds_of_the_core_door(profile: str) -> float:
    """Of processor time, for all that judges the reference at the core door."""
    begin = time.process_time()
    _findings(REFERENCE, profile, 0)
    return time.process_time() - begin


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
