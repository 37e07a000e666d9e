"""One class or function of the reference in the place of which another one runs.

Planted faults and legal variants are made this way: small, one decision each, and none of them
leaves a trace in an engine that runs beside it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from nanovllm import llm  # noqa: F401  # what is imported while something is planted would keep it
from nanovllm.conformance.adapters import reference
from nanovllm.conformance.adapters.reference_engine import ReferenceEngine
from nanovllm.conformance.transport import local_door
from nanovllm.engine import scheduler

PlantingDoor = Literal["blocks", "core", "engine", "unit"]


@dataclass(frozen=True, slots=True)
class Planting:
    """A changed reference.

    Attributes:
        name: unique among its kind.
        text: one sentence: what is done otherwise.
        door: through which it shows; `unit` is none, only unit tests see it.
        original: a class or function of the reference.
        replacement: what takes its place.
    """

    name: str
    text: str
    door: PlantingDoor
    original: Any
    replacement: Any

    def make(self) -> Any:
        """The changed reference's `OpenDoor`; the reference itself stays as it is.

        For the door `unit`, a context manager: within it, the reference itself is changed.
        """
        homes = self._homes()
        if self.door == "unit":
            return self._planted(homes)
        with self._planted(homes):
            adapter = ReferenceEngine() if self.door == "engine" else _core()
        return local_door(_Planted(adapter, lambda: self._planted(homes)))

    def _homes(self) -> list[ModuleType]:
        """Modules that name the original, but not those where replacements are made of it."""
        name = self.original.__name__
        makers = (__package__ + ".faults", __package__ + ".variants", __name__)
        homes = [
            module
            for path, module in sys.modules.items()
            if path.startswith("nanovllm.")
            and not path.startswith(makers)
            and vars(module).get(name) is self.original
        ]
        assert homes, f"no module names {name}"
        return homes

    @contextmanager
    def _planted(self, homes: list[ModuleType]) -> Iterator[None]:
        """While it lasts, the replacement is what these modules find under the original's name."""
        name = self.original.__name__
        for module in homes:
            setattr(module, name, self.replacement)
        try:
            yield
        finally:
            for module in homes:
                setattr(module, name, self.original)


def _core() -> reference.ReferenceCore:
    """Finds the class of its scheduler when it makes one, not now."""
    return reference.ReferenceCore(lambda config, hashes: scheduler.Scheduler(config, hashes))


class _Planted:
    """An adapter during whose calls, and only then, something is planted."""

    def __init__(self, adapter: Any, plant: Callable[[], AbstractContextManager[None]]) -> None:
        self._adapter = adapter
        self._plant = plant

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._adapter, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._plant():
                return method(*args, **kwargs)

        return call


def name_of(replacement: Any) -> str:
    """`HitNotCounted` and `hit_not_counted` are `hit-not-counted`."""
    words = re.sub(r"(?<!^)(?=[A-Z])", "-", replacement.__name__)
    return words.replace("_", "-").lower()


def text_of(replacement: Any) -> str:
    return " ".join((replacement.__doc__ or "").split())


def plantings_in(namespace: Mapping[str, object]) -> tuple[Any, ...]:
    """All plantings of a module, in the order of its text."""
    return tuple(value for value in namespace.values() if isinstance(value, Planting))
