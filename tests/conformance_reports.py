"""A run of the suite as its reports see it, made by hand: one verdict of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.conformance.report import Report
from nanovllm.conformance.requirement import load_spec
from nanovllm.conformance.verdicts import Outcome, Verdict

SPEC = load_spec()


def row(request: int, start: int, count: int, *table: int) -> dict[str, Any]:
    return {"id": [request, 0], "start": start, "count": count, "block_table": list(table)}


def plan(step: int, *rows: dict[str, Any], preempted: tuple[int, ...] = ()) -> dict[str, Any]:
    planned = {"step": step, "rows": list(rows), "preempted": [[i, 0] for i in preempted]}
    return {"op": "schedule", "plan": planned}


def commit(step: int, *finished: int, published: tuple[int, ...] = ()) -> dict[str, Any]:
    ended = [{"id": [i, 0], "reason": "length"} for i in finished]
    pool = {"free": [], "ref_counts": [], "published": [{"block": b} for b in published]}
    return {"op": "commit", "step": step, "finished": ended, "pool": pool}


TRACE: dict[str, Any] = {
    "schema": 1,
    "world": {"block_size": 4, "num_blocks": 4},
    "operations": [
        {"op": "add", "request": 0, "prompt": [1, 2, 1, 2, 1], "max_tokens": 2},
        plan(0, row(0, 0, 5, 0, 1)),
        commit(0, published=(0,)),
        {"op": "add", "request": 1, "prompt": [1, 2, 1, 2, 2, 2], "max_tokens": 3},
        plan(1, row(0, 5, 1, 0, 1), row(1, 4, 2, 0, 2)),
        commit(1, 0, published=(0,)),
        plan(2, row(1, 6, 1, 0, 2)),
        commit(2, published=(0,)),
        plan(3, row(1, 7, 1, 0, 2)),
        commit(3, 1, published=(0, 2)),
        {"op": "add", "request": 2, "prompt": [2] * 9, "max_tokens": 1},
        plan(4, row(2, 0, 9, 3, 1, 0)),
    ],
}
"""Two requests share block 0, and what they leave is taken by a third."""

STORY = (
    "4 blocks of 4 tokens",
    "add request 0: prompt [1, 2, 1, 2, 1], 2 tokens",
    "step 0: request 0 computes 0-4",
)

VERDICTS = (
    Verdict("BLK-1", Outcome.PASS, 1234),
    Verdict("BLK-4", Outcome.BLOCKED, 0, "needs BLK-8, which fails"),
    Verdict("BLK-8", Outcome.FAIL, 17, "block 0 <b>is</b> read by request 1", STORY, TRACE),
    Verdict("PFX-9", Outcome.FAIL, 3, "evicts the newest first"),
    Verdict("PFX-11", Outcome.KNOWN_FAIL, 3, "cached 0, expected 4; bug: reported", STORY, TRACE),
    Verdict("PFX-14", Outcome.UNSUPPORTED, 0, "does not declare salt"),
    Verdict("SCH-2", Outcome.UNEXPECTED_PASS, 5, "is in the known failures, and passes"),
    Verdict("SCH-6", Outcome.NOT_EXERCISED, 0, "no example reached it"),
    Verdict("SCH-8", Outcome.ERROR, 1, "KeyError: 3"),
)


def report(*verdicts: Verdict, **fields: Any) -> Report:
    """Of these verdicts, or of one of each kind."""
    chosen: Mapping[str, Verdict] = {v.spec_id: v for v in verdicts or VERDICTS}
    about = {"engine": {"name": "toy", "version": "0.3"}, "settings": {"profile": "ci", "seed": 7}}
    return Report(SPEC, chosen, **{**about, **fields})
