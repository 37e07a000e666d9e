"""`pytest --engine`: each requirement is a test, whose outcome is its verdict."""

from __future__ import annotations

import pytest

from nanovllm.conformance.options import RunOptions
from nanovllm.conformance.parts import replay, suite_parts
from nanovllm.conformance.plugin import fail_session, print_in_summary
from nanovllm.conformance.report import Report
from nanovllm.conformance.run import NotTestable, SuiteRun, select
from nanovllm.conformance.verdicts import Outcome, Verdict

TESTED_DOORS = ("blocks", "core", "engine")
"""Doors that have parts of the suite; others are for engines on their devices."""


class EngineTests:
    """Runs the suite when the first test is due, and reports it at the end."""

    def __init__(self, config: pytest.Config, options: RunOptions) -> None:
        self.options = options
        self.report: Report | None = None
        self.failure: str | None = None

    def pytest_ignore_collect(self) -> bool:
        """The repository's tests say nothing about another engine."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        try:
            chosen = select(self.options, TESTED_DOORS)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        items[:] = [RequirementTest.from_parent(session, name=i, tests=self) for i in chosen]

    def verdict(self, spec_id: str) -> Verdict | None:
        """What the run says of it; None if it judges no such thing of this engine."""
        if self.failure is None and self.report is None:
            try:
                self.report = SuiteRun(self.options, suite_parts(), replay).run()
            except (NotTestable, ValueError) as error:
                self.failure = str(error)
        if self.report is None:
            return Verdict(spec_id, Outcome.ERROR, message=self.failure or "")
        return self.report.verdicts.get(spec_id)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.report is not None:
            fail_session(session, self.report, strict=self.options.strict)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.report is not None:
            print_in_summary(terminalreporter, self.report, strict=self.options.strict)


class RequirementTest(pytest.Item):
    """One requirement."""

    def __init__(self, *, tests: EngineTests, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.tests = tests

    def runtest(self) -> None:
        verdict = self.tests.verdict(self.name)
        if verdict is None:
            pytest.skip("not selected for the doors of this engine")
        self.user_properties.append(("verdict", str(verdict.outcome)))
        self.user_properties.append(("evaluations", verdict.evaluations))
        report = self.tests.report
        if verdict.outcome is Outcome.PASS:
            return
        if verdict.outcome is Outcome.KNOWN_FAIL:
            pytest.xfail(verdict.message)
        harmless = (Outcome.UNSUPPORTED, Outcome.NOT_EXERCISED, Outcome.BLOCKED)
        if verdict.outcome in harmless or (report and report.is_deviation(verdict)):
            pytest.skip(f"{verdict.outcome}: {verdict.message}".rstrip(": "))
        raise NotConforming(verdict)

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None
    ) -> str:
        if isinstance(excinfo.value, NotConforming):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[str, None, str]:
        return self.nodeid, None, self.name


class NotConforming(Exception):  # noqa: N818
    """A verdict that fails the test of its requirement."""

    def __init__(self, verdict: Verdict) -> None:
        lines = [f"{verdict.outcome}: {verdict.message}", *verdict.story]
        super().__init__("\n".join(lines))
