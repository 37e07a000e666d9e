"""The report as one page of HTML that needs nothing else."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from nanovllm.conformance.reports.markdown import STORIES, TOLD
from nanovllm.conformance.reports.picture import COLOURS, legend, picture
from nanovllm.conformance.verdicts import Verdict

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report


def to_html(report: Report) -> str:
    """Self-contained, for narrow and wide screens, dark and light."""
    others = [(o, report.with_outcome(o)) for o in TOLD if o not in STORIES]
    return _template().render(
        report=report,
        labels=report.labels,
        groups=list(report.by_group()),
        details=[_detail(report, v) for v in report.with_outcome(*STORIES)],
        told=report.with_outcome(*STORIES),
        others=[(outcome, verdicts) for outcome, verdicts in others if verdicts],
        problems=[_linked(text[0].upper() + text[1:], report) for text in report.problems()],
        colours=range(COLOURS),
    )


def _detail(report: Report, verdict: Verdict) -> dict[str, Any]:
    svg, requests = "", []
    if verdict.trace is not None:
        svg, requests = picture(verdict.trace), legend(verdict.trace)
    return {
        "verdict": verdict,
        "requirement": report.requirement(verdict),
        "picture": Markup(svg),
        "legend": requests,
        "command": report.commands.get(verdict.spec_id),
    }


def _linked(text: str, report: Report) -> Markup:
    """Ids that have an article lead to it."""
    told = {verdict.spec_id for verdict in report.with_outcome(*STORIES)}
    return Markup("").join(
        Markup('<a href="#{0}">{0}</a>').format(word) if word in told else escape(word)
        for word in re.split(r"(\b[A-Z]+-\d+[a-z]?\b)", text)
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("nanovllm.conformance", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    return environment.get_template("page.html")


def _code(text: str) -> Markup:
    """`x` as code, the rest as text."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
        for i, part in enumerate(parts)
    )
