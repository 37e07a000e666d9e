"""A core door to the reference through which one thing is told or done wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.transport import OpenDoor, local_door

Bend = Callable[[Any], Any]


class BentCore(ReferenceCore):
    """The reference; what `bends` names is passed through a function before it is told.

    `world` bends what the engine is configured with; the suite goes on with its own.
    """

    def __init__(self, bends: dict[str, Bend]) -> None:
        super().__init__()
        self.bends = bends

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        bends = super().__getattribute__("__dict__").get("bends", {})
        if name == "reset" and "world" in bends:
            return lambda world: value(bends["world"](world))
        if name not in bends:
            return value
        return lambda *args, **kwargs: bends[name](lambda: value(*args, **kwargs))


def bent(**bends: Bend) -> OpenDoor:
    """A function is given the call, and returns what is told instead of its result."""
    return local_door(BentCore(bends))


def reference() -> OpenDoor:
    return local_door(ReferenceCore())
