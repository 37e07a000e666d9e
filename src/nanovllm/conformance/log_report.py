"""The report on an engine's own log; see `log.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from nanovllm.conformance.judge import block, merge
from nanovllm.conformance.log import check_log
from nanovllm.conformance.registry import list_requirements, load_spec
from nanovllm.conformance.report import Report


def report_of_log(path: Path, pattern: str = "*") -> Report:
    """What the log shows of the requirements that match; of others it says nothing.

    Raises:
        ValueError: it is no log, or no requirement matches.
    """
    began = time.monotonic()
    selected = [requirement.id for requirement in list_requirements(pattern=pattern)]
    if not selected:
        raise ValueError(f"no requirement is {pattern}; see `nanovllm conformance list`")
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        found = merge(check_log(lines, selected))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    hello = json.loads(next(filter(str.strip, lines)))["hello"]
    spec = load_spec()
    return Report(
        spec,
        block(spec.requirements, {i: found[i] for i in selected if i in found}),
        engine={"name": hello["engine"], "version": hello["version"], "log": str(path)},
        settings={"log": path.name},
        seconds=time.monotonic() - began,
    )
