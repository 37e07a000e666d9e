"""Examples, lived through with all checks on, until every one of them has had its say."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from nanovllm.conformance.checks import CHECKS
from nanovllm.conformance.entries import Derailed, Unreadable
from nanovllm.conformance.panel import Panel
from nanovllm.conformance.protocol import CoreDoor, Hello, Refused, Unsupported, World
from nanovllm.conformance.session import Session
from nanovllm.conformance.verdicts import Violation

Failure = tuple[Session, Violation]

ENOUGH = 4
"""Sightings of a failure among which the shortest story is looked for."""


@dataclass(frozen=True, slots=True)
class Example:
    """A world, and what is done in it with a session that has not started."""

    world: World
    play: Callable[[Session], None]
    logged: bool = False


@dataclass(slots=True)
class Examination:
    """What came of it.

    Attributes:
        counts: requirement -> evaluations while nothing that fails could hide any.
        sightings: requirement -> sessions that show a failure of it, and how; shortest first.
        errors: requirement -> what of the harness or the adapter went wrong.
        events: situation -> number of examples that came to it.
        broken: traceback of what ended the examination early, if anything did.
    """

    counts: Counter[str] = field(default_factory=Counter)
    sightings: dict[str, list[Failure]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    broken: str = ""

    @property
    def failures(self) -> dict[str, Failure]:
        """The shortest of each."""
        return {spec_id: failures[0] for spec_id, failures in self.sightings.items()}

    def note(self, session: Session, violation: Violation) -> None:
        failures = self.sightings.setdefault(violation.spec_id, [])
        failures.append((session, violation))
        failures.sort(key=lambda failure: len(failure[0].operations))

    def is_settled(self, spec_ids: Collection[str], enough: int) -> bool:
        """Whether each of these has failed so often."""
        return all(len(self.sightings.get(spec_id, ())) >= enough for spec_id in spec_ids)


def examine(
    door: CoreDoor,
    hello: Hello,
    examples: Sequence[Example],
    select: Collection[str] | None = None,
    *,
    enough: int = ENOUGH,
) -> Examination:
    """Live through the examples; then again without the checks that failed, until none does.

    An example ends with its first violation, so that one which fails often would hide others.
    When all that is left has failed `enough` times, there is a story to choose, and examples that
    only show it again are not worth their time.
    """
    result = Examination()
    remaining = {c.spec_id for c in CHECKS if select is None or c.spec_id in select}
    while remaining:
        panel = Panel(hello.capabilities, remaining)
        result.events.clear()
        for example in examples:
            session = Session(door, hello, example.world, panel, logged=example.logged)
            _live(example, session, panel, result)
            if result.broken:
                result.errors.update(dict.fromkeys(remaining, result.broken))
                return result
            result.events.update(name for name, times in session.book.events.items() if times)
            if result.is_settled(remaining, enough):
                break
        result.counts.update(panel.evaluations.counts)
        result.errors.update(panel.errors)
        failed = remaining & result.sightings.keys()
        if not failed:
            break
        remaining -= failed
        for spec_id in remaining:
            del result.counts[spec_id]
    return result


def _live(example: Example, session: Session, panel: Panel, result: Examination) -> None:
    try:
        example.play(session)
    except Violation:
        for violation in panel.violations:
            result.note(session, violation)
    except Derailed:
        pass
    except Unreadable:
        raise
    except (Refused, Unsupported):
        # An engine need not offer every world; what it declares it has to offer.
        if session.operations:
            result.broken = traceback.format_exc()
    except Exception:
        result.broken = traceback.format_exc()


def again(door: CoreDoor, hello: Hello, example: Example, spec_id: str) -> Failure | None:
    """The example with the checks of one requirement alone; None if they do not fail."""
    panel = Panel(hello.capabilities, {spec_id})
    session = Session(door, hello, example.world, panel)
    try:
        example.play(session)
    except Violation as violation:
        return session, violation
    except (Derailed, Refused, Unsupported):
        return None
    return None
