"""What a legal variant is, and the decorator that makes one of a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.conformance.planting import Planting, name_of, text_of


@dataclass(frozen=True, slots=True)
class Variant(Planting):
    """A legal engine; `text` says what it does."""


def variant(replacement: Any) -> Variant:
    """Make a variant of what the reference is to run in place of the class's base."""
    name, text = name_of(replacement), text_of(replacement)
    return Variant(name, text, "core", replacement.__bases__[0], replacement)
