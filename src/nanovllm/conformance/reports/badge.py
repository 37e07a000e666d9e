"""A badge for a README: one line of SVG, without fonts or files from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nanovllm.conformance.verdicts import Outcome

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report

_GREEN, _RED, _GREY = "#1a7f37", "#c93c37", "#6e7781"
_CHARACTER, _MARGIN = 6.6, 8


def to_badge(report: Report) -> str:
    """Grey if the run was not complete or judged nothing, so that it never looks like a pass."""
    label = f"conformance {report.spec.version}"
    counts = report.counts
    if not report.complete or not report.evaluations:
        value, colour = "incomplete", _GREY
    else:
        value = f"{counts[Outcome.PASS]} pass"
        bad = len(report.with_outcome(Outcome.FAIL, Outcome.ERROR, Outcome.UNEXPECTED_PASS))
        bad -= sum(map(report.is_deviation, report.verdicts.values()))
        value += f", {bad} fail" if bad else ""
        known = counts[Outcome.KNOWN_FAIL]
        value += f", {known} known" if known else ""
        colour = _RED if report.problems() else _GREEN
    left, right = (len(text) * _CHARACTER + 2 * _MARGIN for text in (label, value))
    title = escape(f"{label}: {value}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:.0f}" height="20" role="img"'
        f' aria-label="{title}"><title>{title}</title>'
        f'<clipPath id="r"><rect width="{left + right:.0f}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{left:.0f}" height="20" fill="#444c56"/>'
        f'<rect x="{left:.0f}" width="{right:.0f}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
        ' text-anchor="middle">'
        f"{_text(left / 2, left, label)}{_text(left + right / 2, right, value)}</g></svg>\n"
    )


def _text(centre: float, width: float, text: str) -> str:
    inner = width - 2 * _MARGIN
    return f'<text x="{centre:.0f}" y="14" textLength="{inner:.0f}">{escape(text)}</text>'
