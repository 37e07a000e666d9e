"""What a check is: a function of one event that speaks for one requirement alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nanovllm.conformance.verdicts import Evaluations


class Require(Protocol):
    """Count an evaluation; raise a `Violation` of the check's requirement if it does not hold.

    `message` is put together only then.
    """

    def __call__(self, holds: object, *message: object) -> None: ...


E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Check:
    """One way in which one requirement is put to the test.

    Attributes:
        event: the type of what it looks at; of nothing else it is told.
        needs: capabilities without which the requirement, or this look at it, does not apply.
    """

    spec_id: str
    event: type
    needs: frozenset[str]
    run: Callable[[Any, Require], None]


def check(
    spec_id: str, event: type[E], *needs: str
) -> Callable[[Callable[[E, Require], None]], Check]:
    """Make a check of a function."""

    def decorate(run: Callable[[E, Require], None]) -> Check:
        return Check(spec_id, event, frozenset(needs), run)

    return decorate


def requirement(spec_id: str, evaluations: Evaluations) -> Require:
    """The `Require` of one requirement."""

    def require(holds: object, *message: object) -> None:
        evaluations.require(holds, spec_id, *message)

    return require
