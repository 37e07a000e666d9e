"""Jobs for tests: files of requests, and what came out."""

import json
from pathlib import Path
from typing import Any

from nanovllm import LLM
from nanovllm.jobs import Job

DEFAULTS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
MODEL = Path("any-model")
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 9},
    {"id": "ids", "prompt_token_ids": [5, 6, 7]},
    {"messages": [{"role": "user", "content": "hi"}], "id": {"any": "value"}},
    {"prompt": "hello", "sampling_params": {"n": 2, "temperature": 0.9, "seed": 3}},
    {"prompt": "again", "max_tokens": 2},
]


def write(path: Path, requests: list[Any]) -> Path:
    """One line per request; bytes are written as they are."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in requests]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def open_job(source: Path, target: Path, **changes: Any) -> Job:
    return Job(source, target, **{"defaults": DEFAULTS, "model": MODEL} | changes)


def run(llm: LLM, source: Path, target: Path, **changes: Any) -> list[dict[str, Any]]:
    """Runs to the end; returns the records that were missing."""
    with open_job(source, target, **changes) as job:
        return list(job.run(llm))


def records(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in target.read_bytes().splitlines()]
