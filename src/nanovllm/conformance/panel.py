"""All checks that are on, and what they have found so far."""

from __future__ import annotations

import traceback
from collections.abc import Collection

from nanovllm.conformance.checks import CHECKS, Check
from nanovllm.conformance.checks.check import Require, requirement
from nanovllm.conformance.events import Event
from nanovllm.conformance.verdicts import Evaluations, Violation


def applicable(capabilities: Collection[str], select: Collection[str] | None) -> tuple[Check, ...]:
    """Checks of the selected requirements (all if None) for an engine that declares these."""
    return tuple(
        check
        for check in CHECKS
        if check.needs <= set(capabilities) and (select is None or check.spec_id in select)
    )


class Panel:
    """Tells every check of every event that it looks at.

    Attributes:
        violations: of the last `hear`, one a requirement, in the order of the checks.
        errors: requirement -> traceback of a check of it that failed by itself.
    """

    def __init__(
        self, capabilities: Collection[str], select: Collection[str] | None = None
    ) -> None:
        self.evaluations = Evaluations()
        self.violations: list[Violation] = []
        self.errors: dict[str, str] = {}
        self._checks: dict[type, list[tuple[Check, Require]]] = {}
        for check in applicable(capabilities, select):
            require = requirement(check.spec_id, self.evaluations)
            self._checks.setdefault(check.event, []).append((check, require))

    def hear(self, event: Event) -> None:
        """Raises the first violation, after every check has spoken."""
        self.violations = []
        for check, require in self._checks.get(type(event), ()):
            try:
                check.run(event, require)
            except Violation as violation:
                if all(violation.spec_id != other.spec_id for other in self.violations):
                    self.violations.append(violation)
            except Exception:
                self.errors.setdefault(check.spec_id, traceback.format_exc())
        if self.violations:
            raise self.violations[0]
