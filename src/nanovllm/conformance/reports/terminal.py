"""The report on a terminal: a table, then what a person has to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from nanovllm.conformance.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report

_STYLES = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold red",
    "unexpected pass": "bold red",
    "deviation": "yellow",
    "known fail": "yellow",
    "blocked": "yellow",
    "not exercised": "magenta",
    "unsupported": "dim",
}
_SHOWN = (Outcome.FAIL, Outcome.ERROR, Outcome.UNEXPECTED_PASS)
_LISTED = (Outcome.KNOWN_FAIL, Outcome.BLOCKED)
_NAMED = (Outcome.NOT_EXERCISED, Outcome.UNSUPPORTED)


def print_report(report: Report, console: Console, *, strict: bool = False) -> None:
    """Table of groups, each failure with its story, and the conclusion as the last line."""
    table = _table(report)
    # A column that does not fit would be dropped without a word, and it might be the errors.
    width = max(console.width, Measurement.get(console, console.options, table).minimum)
    console.print(table, width=width, crop=False)
    for verdict in report.with_outcome(*_SHOWN):
        _print_failure(report, verdict, console)
    console.print()
    for verdict in report.with_outcome(*_LISTED):
        _print(
            console,
            (f"{verdict.spec_id} {report.label(verdict)}: ", "yellow"),
            (verdict.message, ""),
        )
    for remark in report.remarks:
        _print(console, (f"{remark.spec_id} remark: ", "yellow"), (remark.message, ""))
    for outcome in _NAMED:
        if verdicts := report.with_outcome(outcome):
            label = report.label(verdicts[0])
            names = ", ".join(verdict.spec_id for verdict in verdicts)
            _print(console, (f"{label}: ", _STYLES[label]), (names, ""))
    _print_conclusion(report, console, strict)


def _table(report: Report) -> Table:
    name = f"{report.engine.get('name')} {report.engine.get('version') or ''}".strip()
    title = Text(f"Conformance of {name}", style="bold")
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("group", min_width=14)
    for label in report.labels:
        table.add_column(label, justify="right", style=_STYLES[label], min_width=_width(label))
    table.add_column("evaluations", justify="right", no_wrap=True)
    for group, verdicts in report.by_group():
        evaluations = sum(verdict.evaluations for verdict in verdicts)
        table.add_row(*_cells(report, group, verdicts, evaluations))
    table.add_section()
    table.add_row(*_cells(report, "all", report.verdicts.values(), report.evaluations))
    return table


def _width(label: str) -> int:
    return max(map(len, label.split()))


def _cells(
    report: Report, title: str, verdicts: Iterable[Verdict], evaluations: int
) -> list[str | Text]:
    tally = report.tally(verdicts)
    return [Text(title), *(str(tally[o] or "") for o in report.labels), f"{evaluations:,}"]


def _print_failure(report: Report, verdict: Verdict, console: Console) -> None:
    requirement = report.requirement(verdict)
    label = report.label(verdict)
    console.print()
    _print(console, (f"{verdict.spec_id} {label}: ", _STYLES[label]), (requirement.title, "bold"))
    _print(console, ("  required   ", "dim"), (requirement.text, ""))
    _print(console, ("  seen       ", "dim"), (verdict.message, ""))
    for i, line in enumerate(verdict.story):
        _print(console, ("  story      " if i == 0 else " " * 13, "dim"), (line, ""))
    if command := report.commands.get(verdict.spec_id):
        _print(console, ("  reproduce  ", "dim"), (command, "cyan"))


def _print_conclusion(report: Report, console: Console, strict: bool) -> None:
    console.print()
    problems = report.problems(strict=strict)
    if not problems:
        passed = report.counts[Outcome.PASS]
        text = f"{passed} requirements pass, {report.evaluations:,} evaluations"
        _print(console, ("OK: ", "bold green"), (f"{text} in {report.seconds:.1f} s", ""))
    for problem in problems:
        _print(console, ("NOT OK: ", "bold red"), (problem, ""))


def _print(console: Console, *parts: tuple[str, str]) -> None:
    """A line as it is: an engine's words are no markup, and a command can be pasted."""
    console.print(Text.assemble(*parts), soft_wrap=True)
