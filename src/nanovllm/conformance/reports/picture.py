"""The blocks over time as SVG: a row is a physical block, a column a step, a colour a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nanovllm.conformance.protocol import RequestId
from nanovllm.conformance.reports.history import Cell, Column, Holder, blocks_of, columns

CELL_WIDTH, CELL_HEIGHT = 56, 34
LEFT, TOP = 64, 26
COLOURS = 8
"""Colours of the page's style, `--request-0` and so on; later requests take them again."""


def picture(trace: Mapping[str, Any]) -> str:
    """An SVG element; empty if the trace has no step that computes anything.

    Full colour is what a step computes, pale is what a table names, hatched what a block still
    holds of one that let go of it. A dot marks what the engine says can be hit.
    """
    steps = columns(trace)
    if not steps:
        return ""
    blocks = blocks_of(trace, steps)
    width = LEFT + CELL_WIDTH * len(steps) + 1
    height = TOP + CELL_HEIGHT * len(blocks) + 1
    parts = [_block_labels(blocks), *(_step_label(i, c) for i, c in enumerate(steps))]
    for i, column in enumerate(steps):
        for j, block in enumerate(blocks):
            cell = column.cells.get(block, Cell())
            parts.append(_cell(LEFT + i * CELL_WIDTH, TOP + j * CELL_HEIGHT, cell, block, column))
    return (
        f'<svg class="blocks" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label="Blocks over time">{"".join(parts)}</svg>'
    )


def legend(trace: Mapping[str, Any]) -> list[tuple[int, str]]:
    """`(colour, name)` of the requests in the picture."""
    ids = {
        holder.id for c in columns(trace) for cell in c.cells.values() for holder in cell.holders
    }
    return [(_colour(id), f"request {name(id)}") for id in sorted(ids)]


def name(id: RequestId) -> str:
    return f"{id.request}.{id.sample}" if id.sample else str(id.request)


def _colour(id: RequestId) -> int:
    return (id.request + 3 * id.sample) % COLOURS


def _block_labels(blocks: Sequence[int]) -> str:
    return "".join(
        f'<text class="axis" x="{LEFT - 8}" y="{TOP + j * CELL_HEIGHT + CELL_HEIGHT / 2 + 4:g}"'
        f' text-anchor="end">block {block}</text>'
        for j, block in enumerate(blocks)
    )


def _step_label(i: int, column: Column) -> str:
    x = LEFT + i * CELL_WIDTH + CELL_WIDTH / 2
    title = f"step {column.step}"
    if column.preempted:
        title += f", preempts {', '.join(map(name, column.preempted))}"
    marks = ("▾" if column.preempted else "") + ("✗" if column.failed else "")
    return (
        f'<text class="axis" x="{x:g}" y="{TOP - 9}" text-anchor="middle">'
        f"<title>{escape(title)}</title>step {column.step}{marks}</text>"
    )


def _cell(x: int, y: int, cell: Cell, block: int, column: Column) -> str:
    parts = []
    if cell.holders:
        height = CELL_HEIGHT / len(cell.holders)
        for k, holder in enumerate(cell.holders):
            parts.append(_holder(x, y + k * height, height, holder))
    elif cell.left is not None:
        parts.append(_rect(x, y, CELL_HEIGHT, f"left left-{_colour(cell.left)}"))
    parts.append(_rect(x, y, CELL_HEIGHT, "frame"))
    if cell.published:
        parts.append(f'<circle class="hit" cx="{x + CELL_WIDTH - 7}" cy="{y + 7}" r="3"/>')
    title = f"block {block}, step {column.step}: {_describe(cell)}"
    return f"<g><title>{escape(title)}</title>{''.join(parts)}</g>"


def _holder(x: int, y: float, height: float, holder: Holder) -> str:
    kind = "computed" if holder.written else "held"
    first, last = holder.written or (holder.first, holder.last)
    text = str(first) if first == last else f"{first}-{last}"
    size = min(12.0, height - 2)
    return _rect(x, y, height, f"{kind} r{_colour(holder.id)}") + (
        f'<text class="{kind}" x="{x + CELL_WIDTH / 2:g}" y="{y + height / 2 + size * 0.36:g}"'
        f' font-size="{size:g}" text-anchor="middle">{text}</text>'
    )


def _rect(x: int, y: float, height: float, classes: str) -> str:
    return f'<rect class="{classes}" x="{x}" y="{y:g}" width="{CELL_WIDTH}" height="{height:g}"/>'


def _describe(cell: Cell) -> str:
    parts = [
        f"request {name(h.id)} holds {h.first}-{h.last}"
        + (f", computes {h.written[0]}-{h.written[1]}" if h.written else "")
        for h in cell.holders
    ]
    if not parts:
        parts.append("never used" if cell.left is None else f"free, left by {name(cell.left)}")
    if cell.published:
        parts.append("published")
    return "; ".join(parts)
