"""Traces of failures as files: what `--replay` reads, and the command that is shown names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm.conformance.files import write_atomically
from nanovllm.conformance.verdicts import Verdict

TRACE_FOLDER = Path(".nanovllm/traces")
"""Where traces of failures are kept for `--replay`, below the current directory."""


def save_trace(verdict: Verdict) -> Path:
    """Keep a trace below the current directory; returns where."""
    ignored = TRACE_FOLDER.parent / ".gitignore"
    if not ignored.exists():
        write_atomically(ignored, "*\n")
    path = TRACE_FOLDER / f"{verdict.spec_id}.json"
    write_atomically(path, json.dumps(verdict.trace) + "\n")
    return path


def load_trace(path: Path) -> dict[str, Any]:
    """Raises ValueError if the file holds no trace."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(trace, dict) or "operations" not in trace:
        raise ValueError(f"{path}: is no trace, which is an object with `operations`")
    return trace
