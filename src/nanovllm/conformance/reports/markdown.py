"""The report as Markdown, for a pull request or a page of documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.conformance.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report

TOLD = (
    Outcome.FAIL,
    Outcome.ERROR,
    Outcome.UNEXPECTED_PASS,
    Outcome.KNOWN_FAIL,
    Outcome.BLOCKED,
    Outcome.NOT_EXERCISED,
    Outcome.UNSUPPORTED,
)
"""Outcomes other than a pass, the gravest first."""

STORIES = TOLD[:4]
"""Outcomes with something to show; of the others a line says enough."""


def to_markdown(report: Report) -> str:
    lines = [f"# Conformance of {_plain(str(report.engine.get('name')))}", "", _about(report), ""]
    if not report.complete:
        lines += ["**The run was cut short: this report is not complete.**", ""]
    lines += [*_table(report), ""]
    for outcome in TOLD:
        verdicts = report.with_outcome(outcome)
        if verdicts and outcome in STORIES:
            for verdict in verdicts:
                lines += _story(report, verdict)
        elif verdicts:
            lines += [f"## {report.label(verdicts[0]).capitalize()}", ""]
            lines += [f"- {v.spec_id}: {_plain(v.message)}".rstrip(": ") for v in verdicts]
            lines.append("")
    if report.remarks:
        lines += ["## Remarks", ""]
        lines += [f"- {remark.spec_id}: {_plain(remark.message)}" for remark in report.remarks]
    return "\n".join(lines).rstrip() + "\n"


def _about(report: Report) -> str:
    engine_version = _plain(str(report.engine.get("version") or ""))
    parts = [
        f"version {engine_version}" if engine_version else "",
        f"specification {report.spec.version}",
        f"suite {report.suite_version}",
        *(f"{name} {_plain(str(value))}" for name, value in report.settings.items()),
        f"{report.evaluations:,} evaluations in {report.seconds:.1f} s",
    ]
    return ", ".join(part for part in parts if part) + "."


def _table(report: Report) -> list[str]:
    labels = report.labels
    lines = ["| group | " + " | ".join(labels) + " |", "|---" + "|--:" * len(labels) + "|"]
    for title, verdicts in report.by_group():
        tally = report.tally(verdicts)
        lines.append(f"| {title} | " + " | ".join(str(tally[o] or "") for o in labels) + " |")
    tally = report.tally(report.verdicts.values())
    total = " | ".join(f"**{tally[label]}**" for label in labels)
    return [*lines, f"| **all** | {total} |"]


def _story(report: Report, verdict: Verdict) -> list[str]:
    requirement = report.requirement(verdict)
    lines = [
        f"## {verdict.spec_id}: {report.label(verdict)}",
        "",
        f"{requirement.title}. {requirement.text}",
        "",
    ]
    if verdict.message:
        lines += [f"Seen: {_plain(verdict.message)}", ""]
    if verdict.story:
        lines += ["```", *verdict.story, "```", ""]
    if command := report.commands.get(verdict.spec_id):
        lines += ["```sh", command, "```", ""]
    return lines


def _plain(text: str) -> str:
    """An engine's words as text: nothing in them is markup, nor a line of its own."""
    one_line = " ".join(text.split())
    return "".join("\\" + c if c in r"\`*_[]<>|#" else c for c in one_line)
