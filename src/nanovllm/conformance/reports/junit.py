"""JUnit XML, for the pages of a CI: a requirement is a test case."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from nanovllm.conformance.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report

_ELEMENT = {
    Outcome.FAIL: "failure",
    Outcome.UNEXPECTED_PASS: "failure",
    Outcome.ERROR: "error",
    Outcome.KNOWN_FAIL: "skipped",
    Outcome.UNSUPPORTED: "skipped",
    Outcome.NOT_EXERCISED: "skipped",
    Outcome.BLOCKED: "skipped",
}

# What XML 1.0 cannot hold, not even escaped.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """A deviation from a policy is `skipped`: it fails nobody's build."""
    cases = [_case(report, verdict) for verdict in report.verdicts.values()]
    kinds = [child.tag for case in cases for child in case]
    suite = ET.Element(
        "testsuite",
        name=f"conformance of {_legal(str(report.engine.get('name')))}",
        tests=str(len(cases)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
        skipped=str(kinds.count("skipped")),
        time=f"{report.seconds:.3f}",
    )
    properties = ET.SubElement(suite, "properties")
    about = {"spec": report.spec.version, "suite": report.suite_version}
    for name, value in {**about, "complete": report.complete, **report.settings}.items():
        ET.SubElement(properties, "property", name=name, value=_legal(str(value)))
    suite.extend(cases)
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(report: Report, verdict: Verdict) -> ET.Element:
    requirement = report.requirement(verdict)
    case = ET.Element(
        "testcase", classname=f"conformance.{requirement.group}", name=verdict.spec_id
    )
    properties = ET.SubElement(case, "properties")
    values = {
        "title": requirement.title,
        "level": requirement.level,
        "verdict": str(verdict.outcome),
        "evaluations": str(verdict.evaluations),
    }
    for name, value in values.items():
        ET.SubElement(properties, "property", name=name, value=_legal(value))
    if verdict.outcome is not Outcome.PASS:
        tag = "skipped" if report.is_deviation(verdict) else _ELEMENT[verdict.outcome]
        message = f"{verdict.outcome}: {verdict.message}".rstrip(": ")
        child = ET.SubElement(case, tag, message=_legal(message))
        child.text = _legal("\n".join([*verdict.story, report.commands.get(verdict.spec_id, "")]))
    return case


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
