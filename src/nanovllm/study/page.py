"""Keeps a page's figures current: what stands between a study's two marks is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

from nanovllm.study.findings import Findings


def update(page: Path, name: str, findings: Findings) -> None:
    """Replace the study's part of the page, and its plot beside the page.

    Raises ValueError if the page has no such part.
    """
    begin, end = f"<!-- nanovllm study {name} -->", "<!-- end -->"
    text = page.read_text(encoding="utf-8")
    part = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    plot = page.with_name(f"study-{name}.svg")
    shown = f"{begin}\n{findings.markdown()}\n\n![{name}]({plot.name})\n{end}"
    changed, count = part.subn(lambda _: shown, text)
    if count != 1:
        raise ValueError(f"{page} has {count} parts that begin with {begin}")
    findings.save_plot(plot)
    page.write_text(changed, encoding="utf-8")
