"""One requirement, one verdict; what a check raises, and what it counts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Violation(AssertionError):  # noqa: N818
    """A requirement does not hold. The example stops here: going on would judge the harness."""

    def __init__(self, spec_id: str, message: str) -> None:
        super().__init__(f"{spec_id}: {message}")
        self.spec_id = spec_id
        self.message = message


def summary_of(error: str) -> str:
    """An engine's error without its traceback, but for the place where it was raised."""
    lines = error.splitlines() or [""]
    places = re.findall(r'File "(?:.*[/\\])?([^"]+)", line (\d+)', error)
    return f"{lines[0]} ({':'.join(places[-1])})" if places else lines[0]


@dataclass(slots=True)
class Evaluations:
    """How often each requirement was put to the test; none is never green."""

    counts: Counter[str] = field(default_factory=Counter)

    def count(self, spec_id: str) -> None:
        self.counts[spec_id] += 1

    def require(self, holds: object, spec_id: str, *message: object) -> None:
        """Count an evaluation; raise if it failed. `message` is joined only then."""
        self.counts[spec_id] += 1
        if not holds:
            raise Violation(spec_id, " ".join(map(str, message)))


class Outcome(StrEnum):
    """What a run says of a requirement."""

    PASS = "pass"
    FAIL = "fail"
    KNOWN_FAIL = "known_fail"
    UNEXPECTED_PASS = "unexpected_pass"
    UNSUPPORTED = "unsupported"
    NOT_EXERCISED = "not_exercised"
    BLOCKED = "blocked"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One requirement's outcome.

    Attributes:
        evaluations: how often it was put to the test.
        message: expected and actual, if it failed.
        story: the operations that show it, one a line, as a person would tell them.
        trace: the same as JSON, to be replayed.
    """

    spec_id: str
    outcome: Outcome
    evaluations: int = 0
    message: str = ""
    story: tuple[str, ...] = ()
    trace: dict[str, Any] | None = None
    tests: tuple[str, ...] = ()
