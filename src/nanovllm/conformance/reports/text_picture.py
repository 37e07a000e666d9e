"""The blocks over time as text: a line is a physical block, a column a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.conformance.reports.history import Cell, Holder, blocks_of, columns
from nanovllm.conformance.reports.picture import name

KEY = "r0[0-3]: computes these positions   (r0): holds   r0~: left by, content still there"


def text_picture(trace: Mapping[str, Any]) -> list[str]:
    """Lines of a table and its key; none if the trace has no step that computes anything."""
    steps = columns(trace)
    if not steps:
        return []
    rows = [["", *(f"step {column.step}" for column in steps)]]
    for block in blocks_of(trace, steps):
        cells = (column.cells.get(block, Cell()) for column in steps)
        rows.append([f"block {block}", *map(_cell, cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [*lines, KEY]


def _cell(cell: Cell) -> str:
    if not cell.holders:
        return "." if cell.left is None else f"r{name(cell.left)}~"
    return " ".join(map(_holder, cell.holders))


def _holder(holder: Holder) -> str:
    if holder.written is None:
        return f"(r{name(holder.id)})"
    first, last = holder.written
    return f"r{name(holder.id)}[{first if first == last else f'{first}-{last}'}]"
