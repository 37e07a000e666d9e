"""What a run found, what it means for the exit code, and the files it is written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from nanovllm import __version__
from nanovllm.conformance.files import write_atomically
from nanovllm.conformance.reports.badge import to_badge
from nanovllm.conformance.reports.html import to_html
from nanovllm.conformance.reports.json_report import to_json
from nanovllm.conformance.reports.junit import to_junit
from nanovllm.conformance.reports.markdown import to_markdown
from nanovllm.conformance.requirement import Requirement, Spec
from nanovllm.conformance.verdicts import Outcome, Verdict

DEVIATION = "deviation"
"""A failure of a policy, as people read it; programs see `fail` and the level."""

RED = (Outcome.FAIL, Outcome.ERROR, Outcome.UNEXPECTED_PASS)


def words(outcome: Outcome) -> str:
    return outcome.replace("_", " ")


LABELS = (
    words(Outcome.PASS),
    words(Outcome.FAIL),
    DEVIATION,
    *(words(o) for o in Outcome if o not in (Outcome.PASS, Outcome.FAIL)),
)


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        verdicts: of every selected requirement, in the specification's order.
        engine: who was tested, as JSON: name, version, how it was reached.
        capabilities: whether the engine declares each.
        settings: profile, seed and the like, as JSON.
        commands: by requirement, the command that shows its failure again.
        remarks: deviations from policies that go with a must; never a failure.
        complete: False while the run goes on, and if it was cut short.
    """

    spec: Spec
    verdicts: Mapping[str, Verdict]
    engine: Mapping[str, Any]
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[Verdict, ...] = ()
    complete: bool = True
    seconds: float = 0.0

    @property
    def suite_version(self) -> str:
        return __version__

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(verdict.outcome for verdict in self.verdicts.values())

    @property
    def evaluations(self) -> int:
        return sum(verdict.evaluations for verdict in self.verdicts.values())

    def requirement(self, verdict: Verdict) -> Requirement:
        return self.spec.requirements[verdict.spec_id]

    def with_outcome(self, *outcomes: Outcome) -> list[Verdict]:
        """In the order of `outcomes`, then in the specification's."""
        return [v for o in outcomes for v in self.verdicts.values() if v.outcome is o]

    def by_group(self) -> Iterator[tuple[str, list[Verdict]]]:
        """`(title, verdicts)` of each group, in the specification's order."""
        for name, verdicts in groupby(self.verdicts.values(), lambda v: self.requirement(v).group):
            yield f"{name} {self.spec.groups[name].title}", list(verdicts)

    def is_deviation(self, verdict: Verdict) -> bool:
        """It fails a policy: worth knowing, and nobody's fault."""
        return verdict.outcome is Outcome.FAIL and self.requirement(verdict).level != "must"

    def label(self, verdict: Verdict) -> str:
        """Its outcome as people read it."""
        return DEVIATION if self.is_deviation(verdict) else words(verdict.outcome)

    def tally(self, verdicts: Iterable[Verdict]) -> Counter[str]:
        """How many have each label."""
        return Counter(map(self.label, verdicts))

    @property
    def labels(self) -> list[str]:
        """Columns of a table: labels that occur, and those one looks for."""
        always = words(Outcome.PASS), words(Outcome.FAIL)
        tally = self.tally(self.verdicts.values())
        return [label for label in LABELS if tally[label] or label in always]

    def problems(self, *, strict: bool = False) -> list[str]:
        """Why the run is not green; empty if it is.

        Args:
            strict: a selected requirement that was not exercised is a problem too.
        """
        problems = [] if self.complete else ["the run is not complete"]
        if not self.evaluations:
            problems.append("nothing was evaluated")
        for outcome in (*RED, Outcome.NOT_EXERCISED) if strict else RED:
            ids = [v.spec_id for v in self.with_outcome(outcome) if not self.is_deviation(v)]
            if ids:
                problems.append(f"{len(ids)} {words(outcome)}: {', '.join(ids)}")
        return problems


_WRITERS: Mapping[str, Callable[[Report], str]] = {
    ".json": to_json,
    ".html": to_html,
    ".md": to_markdown,
    ".xml": to_junit,
    ".svg": to_badge,
}


def write_reports(report: Report, paths: Iterable[Path]) -> None:
    """Each path in the format of its suffix, whole or not at all.

    Raises:
        ValueError: there is no such format.
    """
    for path in paths:
        if path.suffix not in _WRITERS:
            known = ", ".join(_WRITERS)
            raise ValueError(f"report {path}: must end in {known}")
        write_atomically(path, _WRITERS[path.suffix](report))
