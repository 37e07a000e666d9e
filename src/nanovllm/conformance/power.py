"""What the suite can see: planted faults before it, and legal variants it must not convict."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.examination import examine
from nanovllm.conformance.faults import FAULTS, Fault
from nanovllm.conformance.planting import Planting
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.runner import all_drawn, recorded, run_core
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

SITUATIONS = (
    "preemption",
    "hit on a free block",
    "hit on a used block",
    "eviction",
    "chunk",
    "whole prompt resident",
)
"""What the state machine's examples have to come to."""

REFERENCE = Planting("reference", "The reference itself.", "core", ReferenceCore, ReferenceCore)

_UNDER_FAULTS = """
import json, os, sys, pytest
from nanovllm.conformance.faults import FAULTS
for name, tests in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with FAULTS[name].make():
            os._exit(pytest.main([*sys.argv[2:], *tests]))
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
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
    """A fault before a run that looks for its own requirement alone.

    Attributes:
        own: the shortest story that convicts it, if any does.
        by: which parts convict it: `scenarios`, `machine`, `unit tests`.
        seconds: of processor time.
    """

    fault: str
    convicts: str
    own: Finding | None
    by: tuple[str, ...]
    seconds: float


def try_fault(fault: Fault, *, profile: str, seed: int, tests: Path) -> Trial:
    """What a run finds; `tests` is the folder of the suite's own unit tests.

    Raises:
        RuntimeError: unit tests could not be run.
    """
    begin = time.process_time()
    found: dict[str, list[Finding]] = {}
    if fault.door == "unit":
        convicted = unit_test_convictions([fault], tests)
        found["unit tests"] = [Finding(fault.convicts, 1, "")] if convicted else []
    else:
        found["scenarios"] = scenario_findings(fault, {fault.convicts})
    if fault.door == "core":
        found["machine"] = machine_findings(fault, profile, seed, {fault.convicts})
    seconds = time.process_time() - begin
    own = {
        part: [finding for finding in findings if finding.spec_id == fault.convicts]
        for part, findings in found.items()
    }
    shortest = min(chain(*own.values()), key=lambda finding: finding.operations, default=None)
    by = tuple(part for part, findings in own.items() if findings)
    return Trial(fault.name, fault.convicts, shortest, by, seconds)


def also_convicted(fault: Fault, profile: str, seed: int) -> set[str]:
    """The other requirements on which a run convicts a fault."""
    others = {finding.spec_id for finding in _find_by_scenarios(fault, None)}
    if fault.door == "core":
        with fault.make() as door:
            hello = door.hello()
            examples = [*recorded(), *all_drawn(hello, profile, seed)]
            others |= examine(door, hello, examples, _musts()).failures.keys()
    return others - {fault.convicts}


def scenario_findings(
    planting: Planting, requirements: Collection[str] | None = None
) -> list[Finding]:
    """What a run that is asked for these finds by scenarios, which are the same in every run.

    A deviation from a `should` is not found here.
    """
    return list(_find_by_scenarios(planting, requirements))


def _find_by_scenarios(
    planting: Planting, requirements: Collection[str] | None
) -> Iterator[Finding]:
    for scenario in _scenarios(planting.door, requirements):
        with planting.make() as door:
            result = run_scenario(scenario, door)
        if result.error:
            yield Finding(HARNESS, 0, f"{scenario.name}: {result.error}")
        if result.violation and result.violation.spec_id in _musts():
            yield _finding(result.violation, len(result.story))


def _scenarios(door: str, requirements: Collection[str] | None) -> Iterable[Scenario]:
    for scenario in SCENARIOS:
        wanted = requirements is None or not set(requirements).isdisjoint(scenario.spec_ids)
        if wanted and scenario.door in DOORS[door] and scenario.level == "must":
            yield scenario


def machine_findings(
    planting: Planting, profile: str, seed: int, requirements: Collection[str] | None = None
) -> list[Finding]:
    """What the corpus and the state machine find at the core door, by the smallest stories."""
    chosen = requirements or _musts()
    verdicts = run_core(planting.make, profile=profile, seed=seed, requirements=chosen)
    errors = {verdict.message for verdict in verdicts if verdict.outcome is Outcome.ERROR}
    return [
        # Its first line is the world.
        Finding(verdict.spec_id, len(verdict.story) - 1, verdict.message)
        for verdict in verdicts
        if verdict.outcome is Outcome.FAIL
    ] + [Finding(HARNESS, 0, error) for error in sorted(errors)]


def is_convicted(fault: Fault, profile: str, seed: int) -> bool:
    """Whether a run convicts a fault on its own requirement; ends as soon as it does."""
    own = {fault.convicts}
    if fault.door == "core":
        with fault.make() as door:
            hello = door.hello()
            examples = [*recorded(), *all_drawn(hello, profile, seed)]
            if examine(door, hello, examples, own, enough=1).failures:
                return True
    return any(finding.spec_id in own for finding in _find_by_scenarios(fault, own))


def is_drawn(fault: Fault, profile: str, seed: int) -> bool:
    """Whether one of the examples that the state machine draws convicts a fault on its own.

    Checks do not hear of each other, so that one requirement alone is judged as in a whole run;
    and one conviction is enough. Corpus and scenarios are left out: they are the same every time.
    """
    with fault.make() as door:
        hello = door.hello()
        examples = all_drawn(hello, profile, seed)
        return fault.convicts in examine(door, hello, examples, {fault.convicts}, enough=1).failures


def _finding(violation: Violation, story: int) -> Finding:
    return Finding(violation.spec_id, max(1, story - 1), violation.message)


@cache
def _musts() -> frozenset[str]:
    return frozenset(r.id for r in load_registry().values() if r.level == "must")


def unit_test_convictions(faults: Iterable[Fault], tests: Path) -> set[str]:
    """Of these faults, those under which a unit test fails that names their requirement.

    Raises:
        RuntimeError: unit tests could not be run.
    """
    nodes: dict[str, list[str]] = {
        fault.name: list(dict.fromkeys(_unit_tests(fault, tests))) for fault in faults
    }
    quiet = ["-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", _UNDER_FAULTS, json.dumps(nodes), *quiet]
    run = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, check=False)
    codes = dict(line.split() for line in run.stdout.splitlines())
    if run.returncode or codes.keys() != nodes.keys() or not set(codes.values()) <= {"0", "1"}:
        raise RuntimeError(f"pytest ended by {codes}: {run.stderr[-500:]}")
    return {name for name, code in codes.items() if code == "1"}


def _unit_tests(fault: Fault, tests: Path) -> Iterable[str]:
    for naming in namings_in(tests):
        is_unit = naming.test.startswith(f"{tests.name}/unit/")
        if is_unit and naming.spec_id == fault.convicts:
            yield naming.test


def needed(spec_id: str) -> set[str]:
    """Requirements that block this one if they fail, directly or not."""
    direct = load_registry()[spec_id].needs
    return set(direct).union(*map(needed, direct))


def reach(profile: str, seed: int) -> Counter[str]:
    """Situation -> number of the profile's examples that bring the reference to it."""
    door = local_door(ReferenceCore())
    hello = door.hello()
    return examine(door, hello, all_drawn(hello, profile, seed)).events


def seconds_of_the_core_door(profile: str) -> float:
    """Of processor time, for all that judges the reference at the core door."""
    begin = time.process_time()
    scenario_findings(REFERENCE)
    machine_findings(REFERENCE, profile, 0)
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
