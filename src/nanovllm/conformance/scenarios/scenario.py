"""What a scenario is: one positive, exact example of what an engine must do, at one door.

The state machine shows that an engine does no harm; a cache that never hits does none either. So
every claim of efficacy has a scenario, and so has every public report that shows at a door.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanovllm.conformance.protocol import CAPABILITIES
from nanovllm.conformance.verdicts import Evaluations

Run = Callable[[Any, Evaluations], None]
DoorName = Literal["blocks", "core", "engine"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One example.

    Attributes:
        name: unique; cases from public reports begin with their number.
        spec_ids: what it shows, the main one first; a fault of the engine counts against that.
        door: what `run` is given.
        needs: capabilities without which the engine promises nothing here.
        lacks: capabilities with which it does not apply.
        level: `should` if a deviation is only a remark, also where the requirement is a must.
        run: raises Violation; counts what it puts to the test, and nothing if the engine, within
            its rights, never came to it.
    """

    name: str
    spec_ids: tuple[str, ...]
    door: DoorName
    run: Run
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    level: Literal["must", "should"] = "must"

    def __post_init__(self) -> None:
        if not self.spec_ids:
            raise ValueError(f"{self.name} shows no requirement")
        if unknown := sorted((self.needs | self.lacks) - CAPABILITIES):
            raise ValueError(f"{self.name}: no such capability: {', '.join(unknown)}")

    @property
    def title(self) -> str:
        """First line of its documentation."""
        return (self.run.__doc__ or self.name).strip().partition("\n")[0]

    def missing(self, capabilities: frozenset[str]) -> tuple[str, ...]:
        """Why an engine that declares these has nothing to show; empty if it has."""
        lacking = [name for name in sorted(self.needs) if name not in capabilities]
        return (*lacking, *(f"no {name}" for name in sorted(self.lacks & capabilities)))


def scenario(
    *spec_ids: str,
    door: DoorName = "core",
    needs: Iterable[str] = (),
    lacks: Iterable[str] = (),
    level: Literal["must", "should"] = "must",
) -> Callable[[Run], Scenario]:
    """Make a scenario of a function; its name becomes the scenario's."""

    def decorate(run: Run) -> Scenario:
        name = run.__name__.replace("_", "-")
        return Scenario(name, spec_ids, door, run, frozenset(needs), frozenset(lacks), level)

    return decorate


def scenarios_of(namespace: Mapping[str, object]) -> tuple[Scenario, ...]:
    """All scenarios of a module, in the order of its text."""
    return tuple(value for value in namespace.values() if isinstance(value, Scenario))
