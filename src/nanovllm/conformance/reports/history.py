"""From a trace to who held which block at which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.conformance.protocol import RequestId

MAX_IDLE_BLOCKS = 12
"""Larger pools are drawn without the blocks that nobody used."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A request's part of a block: positions `[first, last]`, of which this step computes some.

    `written` is None if the step computes none of them.
    """

    id: RequestId
    first: int
    last: int
    written: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A block during a step.

    Attributes:
        holders: requests whose tables name it.
        left: who held it last, if nobody does now; its content may still be hit.
        published: whether the engine says, after the step, that it can be hit; None if it does not
            say.
    """

    holders: tuple[Holder, ...] = ()
    left: RequestId | None = None
    published: bool | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A step: `cells` by block, and what else happened while it was planned."""

    step: int
    cells: Mapping[int, Cell]
    preempted: tuple[RequestId, ...] = ()
    failed: bool = False


@dataclass(slots=True)
class _Tables:
    """What is known of the pool while a trace is walked."""

    block_size: int
    ends: dict[RequestId, tuple[list[int], int]] = field(default_factory=dict)
    last_holder: dict[int, RequestId] = field(default_factory=dict)

    def drop(self, ids: Sequence[RequestId]) -> None:
        for id in ids:
            self.ends.pop(id, None)

    def cells(self, rows: Mapping[RequestId, Mapping[str, Any]]) -> dict[int, Cell]:
        holders: dict[int, list[Holder]] = {}
        for id, (table, end) in self.ends.items():
            for i, block in enumerate(table):
                holders.setdefault(block, []).append(self._holder(id, i, end, rows.get(id)))
                self.last_holder[block] = id
        return {
            block: Cell(tuple(holders.get(block, ())), None if block in holders else last)
            for block, last in self.last_holder.items()
        }

    def _holder(self, id: RequestId, i: int, end: int, row: Mapping[str, Any] | None) -> Holder:
        first, last = i * self.block_size, min((i + 1) * self.block_size, end) - 1
        if row is None:
            return Holder(id, first, last)
        low, high = max(first, row["start"]), min(last, row["start"] + row["count"] - 1)
        return Holder(id, first, last, (low, high) if low <= high else None)


def columns(trace: Mapping[str, Any]) -> list[Column]:
    """The steps of a trace that have rows, in order.

    A block that is held is so until its request ends or loses it, whether or not it has a row.
    """
    tables = _Tables(trace["world"]["block_size"])
    found: list[Column] = []
    in_flight: set[RequestId] = set()
    for operation in trace["operations"]:
        plan = operation.get("plan")
        if plan:
            tables.drop(_ids(plan.get("preempted", ())) + _ended(plan))
            rows = {_id(row["id"]): row for row in plan.get("rows", ())}
            for id, row in rows.items():
                tables.ends[id] = (list(row["block_table"]), row["start"] + row["count"])
            in_flight = set(rows)
            if rows:
                preempted = tuple(_ids(plan.get("preempted", ())))
                found.append(Column(plan["step"], tables.cells(rows), preempted))
        if "pool" in operation and found:
            found[-1] = _with_published(found[-1], operation["pool"])
        if operation["op"] == "fail_step" and found:
            found[-1] = replace(found[-1], failed=True)
        if operation["op"] == "abort":
            gone = [id for id in tables.ends if id.request == operation["request"]]
            tables.drop([id for id in gone if id not in in_flight])
        tables.drop(_ended(operation))
    return found


def blocks_of(trace: Mapping[str, Any], steps: Sequence[Column]) -> list[int]:
    """Blocks to draw: all of a small pool, of a large one those that were ever held."""
    held = {block for column in steps for block in column.cells}
    num_blocks = trace["world"].get("num_blocks", 0)
    return sorted(held.union(range(num_blocks)) if num_blocks <= MAX_IDLE_BLOCKS else held)


def _with_published(column: Column, pool: Mapping[str, Any]) -> Column:
    entries = pool.get("published", ())
    blocks = {entry["block"] if isinstance(entry, Mapping) else entry for entry in entries}
    cells = {b: replace(cell, published=b in blocks) for b, cell in column.cells.items()}
    return replace(column, cells=cells)


def _ended(result: Mapping[str, Any]) -> list[RequestId]:
    return _ids([ended["id"] for ended in result.get("finished", ())])


def _ids(values: Sequence[Any]) -> list[RequestId]:
    return [_id(value) for value in values]


def _id(value: Any) -> RequestId:
    return RequestId(*value) if isinstance(value, list | tuple) else RequestId(value)
