"""What a planted fault is, and the decorator that makes one of a class or a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.conformance.planting import Planting, PlantingDoor, name_of, text_of


@dataclass(frozen=True, slots=True)
class Fault(Planting):
    """One defect; `text` says what a programmer got wrong.

    Attributes:
        convicts: the requirement that must find it; others may too.
    """

    convicts: str


def planted(
    spec_id: str, *, instead_of: Any = None, door: PlantingDoor = "core"
) -> Callable[[Any], Fault]:
    """Make a fault of what the reference is to run in place of `instead_of`, by default a class's
    base; name and documentation are the fault's."""

    def decorate(replacement: Any) -> Fault:
        original = instead_of or replacement.__bases__[0]
        name, text = name_of(replacement), text_of(replacement)
        return Fault(name, text, door, original, replacement, spec_id)

    return decorate
