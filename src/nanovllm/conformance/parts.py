"""The parts of the suite as a run goes through them, and how a trace is run again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.conformance.run import Findings, Part, Subject
from nanovllm.conformance.runner import run_core
from nanovllm.conformance.scenarios import SCENARIOS, Result, Scenario, run_scenarios
from nanovllm.conformance.trace import replay_all
from nanovllm.conformance.verdicts import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class CorePart:
    """The corpus of known stories, then those that the state machine draws."""

    name: str = "corpus and state machine"

    def judge(self, subject: Subject, findings: Findings) -> None:
        if "core" in subject.doors:
            findings.verdicts += run_core(
                lambda: subject.door,
                profile=subject.options.profile,
                seed=subject.options.seed,
                requirements=subject.selected,
            )


@dataclass(frozen=True, slots=True)
class ScenariosPart:
    """Positive, exact examples at one door."""

    door: str

    @property
    def name(self) -> str:
        return f"scenarios of the {self.door} door"

    def judge(self, subject: Subject, findings: Findings) -> None:
        if self.door not in subject.doors:
            return
        for result in run_scenarios(lambda: subject.door, self._chosen(subject)):
            if result.violation and result.scenario.level == "should":
                _deviation(result, subject, findings)
            else:
                findings.verdicts += result.verdicts()

    def _chosen(self, subject: Subject) -> Iterator[Scenario]:
        """Those that show what is selected, each announced as its turn comes."""
        wanted = subject.selected.keys()
        for scenario in SCENARIOS:
            if scenario.door == self.door and not wanted.isdisjoint(scenario.spec_ids):
                subject.tell(f"{self.name}: {scenario.name}")
                yield scenario


def _deviation(result: Result, subject: Subject, findings: Findings) -> None:
    """Of a policy: the verdict of a requirement that is one itself, a remark on a must."""
    assert result.violation is not None
    spec_id = result.violation.spec_id
    deviation = Verdict(
        spec_id,
        Outcome.FAIL,
        result.evaluations.counts[spec_id],
        result.violation.message,
        result.story,
        tests=(result.scenario.name,),
    )
    passed = [replace(v, message="") for v in result.verdicts() if v.spec_id != spec_id]
    findings.verdicts += passed
    requirement = subject.selected.get(spec_id)
    if requirement is not None and requirement.level != "must":
        findings.verdicts.append(deviation)
    else:
        findings.remarks.append(deviation)


def suite_parts() -> tuple[Part, ...]:
    """In the order in which they run."""
    return (CorePart(), *map(ScenariosPart, ("blocks", "core", "engine")))


def replay(subject: Subject, trace: Mapping[str, Any]) -> list[Verdict]:
    """See `run.Replayer`; traces are of the core door."""
    if "core" not in subject.hello.doors:
        raise ValueError(
            f"a trace is replayed at the core door, which {subject.hello.engine} lacks"
        )
    return replay_all(trace, subject.door, subject.selected)
