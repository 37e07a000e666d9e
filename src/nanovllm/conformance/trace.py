"""Traces: a story as JSON, told in plain words, and lived through again by any engine.

    {"schema": 1, "world": {...}, "operations": [...], "violation": {"id": ..., "message": ...}}

`operations.py` says what an operation is. A replay repeats what was asked, leaves out what this
engine cannot be asked now, and then runs until everything has ended. `corpus/` has the stories of
known defects; every run begins with them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.resources import files
from itertools import groupby
from typing import Any

from nanovllm.conformance.codec import ProtocolError, decode
from nanovllm.conformance.examination import Example, examine
from nanovllm.conformance.host import plain
from nanovllm.conformance.machine import perform
from nanovllm.conformance.operations import Operation, from_json, to_json
from nanovllm.conformance.protocol import CoreDoor, World
from nanovllm.conformance.session import Session
from nanovllm.conformance.verdicts import Outcome, Verdict, Violation

SCHEMA = 1

Trace = Mapping[str, Any]


def trace_of(session: Session, violation: Violation | None = None) -> dict[str, Any]:
    """All that was done in a session, and how it ended."""
    trace: dict[str, Any] = {
        "schema": SCHEMA,
        "world": plain(session.world),
        "operations": [to_json(operation) for operation in session.operations],
    }
    if violation is not None:
        trace["violation"] = {"id": violation.spec_id, "message": violation.message}
    return trace


def read(trace: Trace) -> tuple[World, list[Operation]]:
    """World and operations of a trace.

    Raises:
        ValueError: it is none; the message says why.
    """
    if trace.get("schema") != SCHEMA:
        raise ValueError(f"a trace of schema {trace.get('schema')!r}; this suite reads {SCHEMA}")
    try:
        world: World = decode(World, trace.get("world"), "world")
    except ProtocolError as error:
        raise ValueError(str(error)) from error
    return world, [from_json(value) for value in trace.get("operations", ())]


def example_of(trace: Trace, options: Mapping[str, Any] | None = None) -> Example:
    """The trace as an example; `options` are the engine's, beside those of its world."""
    world, operations = read(trace)
    world = replace(world, options={**world.options, **(options or {})})
    return Example(world, lambda session: perform(session, operations))


def story(trace: Trace) -> list[str]:
    """The world, then a line for each operation with its answer; repetitions are counted."""
    world, operations = read(trace)
    lines = [tell_world(world)]
    for line, same in groupby(map(str, operations)):
        times = len(list(same))
        lines.append(line if times == 1 else f"{line} ({times} times)")
    return lines


def tell_world(world: World) -> str:
    """Only what is not as usual, beside the sizes."""
    parts = [
        f"{_count(world.num_blocks, 'block')} of {_count(world.block_size, 'token')}",
        _count(world.max_num_seqs, "seat"),
        f"{_count(world.max_num_batched_tokens, 'token')} a step",
    ]
    usual = World(1, 1)
    for name in ("max_model_len", "eos_token_ids", "prefix_cache", "hash", "options"):
        value = getattr(world, name)
        if value != getattr(usual, name) and (name, value) != ("eos_token_ids", (0,)):
            parts.append(f"{name}={value}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def replay(trace: Trace, door: CoreDoor, spec_id: str | None = None) -> Verdict:
    """What the checks of one requirement say of this trace; by default of the one it violated.

    Raises:
        ValueError: it is no trace, or names no requirement.
    """
    spec_id = spec_id or trace.get("violation", {}).get("id")
    if spec_id is None:
        raise ValueError("this trace violated nothing; say which requirement to judge")
    found = {verdict.spec_id: verdict for verdict in replay_all(trace, door, {spec_id})}
    return found.get(spec_id, Verdict(spec_id, Outcome.NOT_EXERCISED))


def replay_all(
    trace: Trace, door: CoreDoor, select: Collection[str] | None = None
) -> list[Verdict]:
    """A verdict for each selected requirement (all if None) that the trace puts to the test."""
    examination = examine(door, door.hello(), [example_of(trace)], select)
    return [
        verdict_of(spec_id, examination.failures.get(spec_id), examination.counts[spec_id])
        for spec_id in sorted({*examination.counts, *examination.failures})
    ] + [
        Verdict(spec_id, Outcome.ERROR, message=message)
        for spec_id, message in sorted(examination.errors.items())
        if spec_id not in examination.failures
    ]


def verdict_of(
    spec_id: str, failure: tuple[Session, Violation] | None, evaluations: int
) -> Verdict:
    """Pass, or fail with its story and trace."""
    if failure is None:
        outcome = Outcome.PASS if evaluations else Outcome.NOT_EXERCISED
        return Verdict(spec_id, outcome, evaluations)
    session, violation = failure
    trace = trace_of(session, violation)
    lines = tuple(story(trace))
    return Verdict(spec_id, Outcome.FAIL, evaluations, violation.message, lines, trace)


def corpus() -> dict[str, Trace]:
    """Stories of known defects, by name."""
    folder = files("nanovllm.conformance") / "corpus"
    traces = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".json")),
        key=lambda entry: entry.name,
    )
    return {
        entry.name.removesuffix(".json"): json.loads(entry.read_text(encoding="utf-8"))
        for entry in traces
    }
