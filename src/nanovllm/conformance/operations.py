"""Calls at the core door and their answers: as objects, as JSON, and in plain words.

As JSON, each is an object whose `op` names it. What the engine answered stands beside what it was
asked; a replay ignores the former, a log is judged by it. Request ids are `[request, sample]`.

    {"op": "add", "request": 0, "prompt": [1, 2], "max_tokens": 4, "options": {...}, "seed": 0,
     "forced": [[2, 0]], "open_end": false, "refused": "..."}
    {"op": "schedule", "plan": {"step": 0, "rows": [{"id": [0, 0], "start": 0, "count": 2,
     "block_table": [0], "phase": null}], "preempted": [], "finished": [], "copies": []}}
    {"op": "commit", "step": 0, "tokens": [[[0, 0], 7]], "finished": [{"id": [0, 0],
     "reason": "stop"}]}
    {"op": "abort", "request": 0, "took": true}
    {"op": "fail_step", "step": 0, "finished": []}
    {"op": "reset_prefix_cache"}

`seed` and `forced` (`[output number from 1, token]`) belong to the suite's model. `open_end` is for
logs: the request may also end for reasons that tokens do not show (a stop string, NaN). `schedule`
and `commit` may carry a `pool`, for pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.conformance.codec import ProtocolError, decode
from nanovllm.conformance.entries import name_of
from nanovllm.conformance.host import plain
from nanovllm.conformance.protocol import (
    Finished,
    Plan,
    PoolView,
    RequestId,
    RequestOptions,
)


@dataclass(slots=True)
class Add:
    """`refused` is the engine's message, None if it took the request."""

    request: int
    prompt: tuple[int, ...]
    max_tokens: int
    options: RequestOptions = field(default_factory=RequestOptions)
    seed: int = 0
    forced: Mapping[int, int] = field(default_factory=dict)
    open_end: bool = False
    refused: str | None = None

    def again(self) -> Add:
        """The same request, not answered yet."""
        return replace(self, refused=None)

    def __str__(self) -> str:
        asked = {"max_tokens": self.max_tokens, **_changed(self.options)}
        options = " ".join(f"{name}={value}" for name, value in asked.items())
        forced = "".join(f", output {i} is {token}" for i, token in self.forced.items())
        refused = f" -> refused: {self.refused}" if self.refused is not None else ""
        return f"add r{self.request} {list(self.prompt)} {options}{forced}{refused}"


@dataclass(slots=True)
class Schedule:
    plan: Plan = field(default_factory=lambda: Plan(step=0))
    pool: PoolView | None = None

    def __str__(self) -> str:
        rows = [
            f"{name_of(row.id)}[{row.start}:{row.end}] table ({', '.join(map(str, table))})"
            for row in self.plan.rows
            for table in [row.block_table]
        ]
        parts = ", ".join(rows) or "nothing"
        if self.plan.copies:
            parts += "; copies " + ", ".join(f"{a} to {b}" for a, b in self.plan.copies)
        if self.plan.preempted:
            parts += "; preempted " + ", ".join(map(name_of, self.plan.preempted))
        return f"schedule -> {parts}{_ends(self.plan.finished)}"


@dataclass(slots=True)
class Commit:
    step: int
    tokens: Mapping[RequestId, int] = field(default_factory=dict)
    finished: tuple[Finished, ...] = ()
    pool: PoolView | None = None

    def __str__(self) -> str:
        tokens = ", ".join(f"{name_of(id)} draws {token}" for id, token in self.tokens.items())
        return f"commit {tokens or 'without a token'}{_ends(self.finished)}"


@dataclass(slots=True)
class Abort:
    request: int
    took: bool = False

    def __str__(self) -> str:
        return f"abort r{self.request} -> {'took' if self.took else 'no such request alive'}"


@dataclass(slots=True)
class FailStep:
    step: int
    finished: tuple[Finished, ...] = ()

    def __str__(self) -> str:
        return f"the step raises{_ends(self.finished)}"


@dataclass(slots=True)
class ResetPrefixCache:
    """In logs: nothing is hittable from here on."""

    def __str__(self) -> str:
        return "the prefix cache is emptied"


Operation = Add | Schedule | Commit | Abort | FailStep | ResetPrefixCache

KINDS: Mapping[str, type] = {
    "add": Add,
    "schedule": Schedule,
    "commit": Commit,
    "abort": Abort,
    "fail_step": FailStep,
    "reset_prefix_cache": ResetPrefixCache,
}


def to_json(operation: Operation) -> dict[str, Any]:
    """It and its answer; fields that say nothing are left out."""
    op = next(name for name, kind in KINDS.items() if type(operation) is kind)
    values = {name: getattr(operation, name) for name in operation.__slots__}
    if isinstance(operation, Add):
        values["options"] = _changed(operation.options)
    if pool := values.pop("pool", None):
        values["pool"] = {
            "free": pool.free,
            "published": [entry.block for entry in pool.published],
            "reserved": pool.reserved,
        }
    told = {k: plain(v) for k, v in values.items() if not (v is None or v is False or v == {})}
    return {"op": op, **told}


def from_json(value: Mapping[str, Any]) -> Operation:
    """The operation and its answer, without the pool.

    Raises:
        ValueError: it is none; the message says why.
    """
    op = str(value.get("op"))
    if op not in KINDS:
        raise ValueError(f"no operation {op!r}; there are {', '.join(KINDS)}")
    fields = {name: item for name, item in value.items() if name not in ("op", "pool")}
    try:
        operation: Operation = decode(KINDS[op], fields, op)
    except ProtocolError as error:
        raise ValueError(str(error)) from error
    return operation


def _changed(options: RequestOptions) -> dict[str, Any]:
    """Options that are not the default."""
    default = RequestOptions()
    return {
        name: getattr(options, name)
        for name in options.__slots__
        if getattr(options, name) != getattr(default, name)
    }


def _ends(finished: tuple[Finished, ...]) -> str:
    ends = ", ".join(f"{name_of(end.id)} ({end.reason})" for end in finished)
    return f"; ended: {ends}" if ends else ""
