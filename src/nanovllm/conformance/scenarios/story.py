"""A door that tells what was asked of it, so that a failure shows the calls that lead to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from nanovllm.conformance.protocol import EngineResult, Finished, Plan, RequestId
from nanovllm.conformance.verdicts import summary_of

MAX_TOKENS_SHOWN = 12
MAX_LINES = 40


class Storyteller:
    """Passes every call on to `door`, and keeps a line for each since the last fresh start."""

    def __init__(self, door: Any) -> None:
        self._door = door
        self.lines: list[str] = []

    def story(self) -> tuple[str, ...]:
        """The lines; of many, those of the beginning and of the end."""
        half, more = MAX_LINES // 2, len(self.lines) - MAX_LINES
        if more <= 0:
            return tuple(self.lines)
        return (*self.lines[:half], f"... {more} more calls ...", *self.lines[-half:])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._door, name)
        if name in _SILENT:
            return method

        def call(*args: Any, **options: Any) -> Any:
            if name in _FRESH:
                self.lines.clear()
            given = filter(None, map(_show, (*args, *options.values())))
            line = f"{name}({', '.join(given)})"
            self.lines.append(line)
            try:
                result = method(*args, **options)
            except Exception as raised:
                self.lines[-1] = f"{line} raises {type(raised).__name__}: {summary_of(str(raised))}"
                raise
            if isinstance(result, Plan) and not (result.rows or result.preempted):
                self._note_empty_plan()
            elif result is not None:
                self.lines[-1] = f"{line} -> {_show(result)}"
            return result

        return call

    def _note_empty_plan(self) -> None:
        """Many in a row are one line."""
        self.lines.pop()
        before = self.lines.pop() if self.lines and self.lines[-1].startswith(_EMPTY) else ""
        count = int(before.rpartition(" ")[2] or 0) + 1
        self.lines.append(f"{_EMPTY}, times {count}")


_EMPTY = "schedule() -> nothing"
_FRESH = frozenset({"reset", "open"})
_SILENT = frozenset({"hello", "stop", "close", "pool", "lookup"})


def _show(value: Any) -> str:
    """As short as can be read."""
    if isinstance(value, Plan):
        return _show_plan(value)
    if isinstance(value, RequestId):
        return _show_id(value)
    if isinstance(value, Finished):
        return f"{_show_id(value.id)} ends: {value.reason}"
    if isinstance(value, EngineResult):
        return f"{_show(value.token_ids)} {value.text!r} {value.finish_reason}"
    if is_dataclass(value):
        changed = (f.name for f in fields(value) if getattr(value, f.name) not in (f.default, {}))
        return ", ".join(f"{name}={_show(getattr(value, name))}" for name in changed)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_show(k)}: {_show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        shown = [text for item in value[:MAX_TOKENS_SHOWN] if (text := _show(item))]
        more = len(value) - MAX_TOKENS_SHOWN
        return f"[{', '.join(shown)}{f', ... {more} more' if more > 0 else ''}]"
    return str(value)


def _show_id(id: RequestId) -> str:
    return f"{id.request}.{id.sample}" if id.sample else str(id.request)


def _show_plan(plan: Plan) -> str:
    parts = [
        f"{_show_id(row.id)}: [{row.start}, {row.end}) in {_show(row.block_table)}"
        for row in plan.rows
    ]
    parts += _tail("preempts", map(_show_id, plan.preempted))
    parts += _tail("gives up", map(_show, plan.finished))
    parts += _tail("copies", (f"{a} to {b}" for a, b in plan.copies))
    return f"step {plan.step}: {'; '.join(parts)}"


def _tail(verb: str, items: Iterable[str]) -> Sequence[str]:
    listed = ", ".join(items)
    return [f"{verb} {listed}"] if listed else []
