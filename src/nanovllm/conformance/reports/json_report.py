"""The report for programs; its keys are fixed, and only ever added to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nanovllm.conformance.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report

SCHEMA = 1


def to_json(report: Report) -> str:
    """See the keys here; `complete` is false if the run was cut short."""
    counts = {str(outcome): report.counts[outcome] for outcome in Outcome}
    document = {
        "schema": SCHEMA,
        "complete": report.complete,
        "suite": report.suite_version,
        "spec": report.spec.version,
        "engine": dict(report.engine),
        "run": {**report.settings, "seconds": round(report.seconds, 3)},
        "summary": {**counts, "evaluations": report.evaluations},
        "requirements": [_requirement(report, v) for v in report.verdicts.values()],
        "remarks": [{"id": v.spec_id, "message": v.message} for v in report.remarks],
        "capabilities": dict(report.capabilities),
    }
    return json.dumps(document, indent=1) + "\n"


def _requirement(report: Report, verdict: Verdict) -> dict[str, Any]:
    requirement = report.requirement(verdict)
    return {
        "id": verdict.spec_id,
        "verdict": str(verdict.outcome),
        "evaluations": verdict.evaluations,
        "tests": list(verdict.tests),
        "message": verdict.message,
        "story": list(verdict.story),
        "trace": verdict.trace,
        "level": requirement.level,
        "title": requirement.title,
        "command": report.commands.get(verdict.spec_id),
    }
