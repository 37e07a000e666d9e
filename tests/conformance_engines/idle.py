"""An engine that takes every request and never does anything, and one that does not start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Idle:
    def hello(self) -> dict[str, Any]:
        return {"engine": "idle", "version": "7", "doors": ["core"], "capabilities": []}

    def reset(self, world: SimpleNamespace) -> None:
        pass

    def add(
        self, request: int, prompt: list[int], max_tokens: int, options: SimpleNamespace
    ) -> None:
        pass

    def schedule(self) -> dict[str, Any]:
        return {"step": 0, "rows": []}

    def commit(self, step: int, tokens: dict[tuple[int, int], int]) -> list[Any]:
        return []


class Unlike(Idle):
    """Answers what is not of the protocol."""

    def schedule(self) -> dict[str, Any]:
        return {"step": "zero"}


def broken() -> Idle:
    raise RuntimeError("no licence")
