"""The repository's own tests as a suite: a requirement's verdict from the tests that name it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any

import pytest

from nanovllm import __version__
from nanovllm.conformance.options import LEVELS
from nanovllm.conformance.plugin import fail_session, print_in_summary
from nanovllm.conformance.registry import Requirement, list_requirements, load_spec
from nanovllm.conformance.report import RED, Report, words, write_reports
from nanovllm.conformance.verdicts import Outcome, Verdict

_PROPERTY = "spec"


class OwnTests:
    """Notes which tests name which requirements, and how these tests end.

    Args:
        given: options of the command line, of `plugin.OWN_TESTS`.
    """

    def __init__(self, config: pytest.Config, given: Mapping[str, Any]) -> None:
        self.given = given
        self.strict = bool(given.get("strict"))
        self.is_worker = hasattr(config, "workerinput")
        self.outcomes: dict[str, Outcome] = {}
        self.messages: dict[str, str] = {}
        self.names: defaultdict[str, list[str]] = defaultdict(list)
        self.report: Report | None = None
        self.began = monotonic()

    @property
    def selected(self) -> list[Requirement]:
        level = self.given.get("level", "may")
        return list_requirements(
            pattern=",".join(self.given.get("req", ())) or "*",
            levels=LEVELS[: LEVELS.index(level) + 1],
        )

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Only tests of what `--req` and `--level` ask for."""
        for item in items:
            ids = dict.fromkeys(i for mark in item.iter_markers("spec") for i in mark.args)
            # Properties reach the summary from the workers of pytest-xdist too, and JUnit.
            item.user_properties += [(_PROPERTY, spec_id) for spec_id in ids]
        if "req" not in self.given and "level" not in self.given:
            return
        wanted = {(_PROPERTY, requirement.id) for requirement in self.selected}
        kept = [item for item in items if wanted & set(item.user_properties)]
        if len(kept) < len(items):
            config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
            items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = _outcome(report)
        if outcome is None:
            return
        test = report.nodeid
        if self.outcomes.get(test) not in RED:
            self.outcomes[test] = outcome
            self.messages[test] = _message(report)
        for name, value in report.user_properties:
            if name == _PROPERTY and test not in self.names[str(value)]:
                self.names[str(value)].append(test)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker or not (self.names or self.given):
            return
        finished = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        self.report = Report(
            load_spec(),
            {r.id: self._verdict(r) for r in self.selected},
            engine={"name": "nanovllm, by its own tests", "version": __version__},
            complete=finished,
            seconds=monotonic() - self.began,
        )
        write_reports(self.report, self.given.get("report", ()))
        if self.given:
            fail_session(session, self.report, strict=self.strict)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.report is None:
            return
        if self.given:
            print_in_summary(terminalreporter, self.report, strict=self.strict)
            return
        counts = self.report.counts
        parts = [f"{counts[o]} {words(o)}" for o in Outcome if counts[o]]
        for outcome in RED:
            ids = [verdict.spec_id for verdict in self.report.with_outcome(outcome)]
            parts += [f"{words(outcome)}: {', '.join(ids)}"] if ids else []
        terminalreporter.write_line("requirements: " + "; ".join(parts))

    def _verdict(self, requirement: Requirement) -> Verdict:
        if requirement.pending:
            return Verdict(requirement.id, Outcome.UNSUPPORTED, message=requirement.pending)
        tests = self.names.get(requirement.id, [])
        outcome = _gravest(self.outcomes[test] for test in tests)
        messages = (self.messages[test] for test in tests if self.outcomes[test] is outcome)
        judged = [test for test in tests if self.outcomes[test] is not Outcome.NOT_EXERCISED]
        message = "" if outcome is Outcome.PASS else next(messages, "no test of it has run")
        return Verdict(requirement.id, outcome, len(judged), message, tests=tuple(tests))


def _gravest(outcomes: Iterable[Outcome]) -> Outcome:
    order = (*RED, Outcome.KNOWN_FAIL, Outcome.PASS, Outcome.NOT_EXERCISED)
    return min(outcomes, key=order.index, default=Outcome.NOT_EXERCISED)


def _outcome(report: pytest.TestReport) -> Outcome | None:
    """What a phase of a test says of it; None if it says nothing."""
    if report.failed:
        return Outcome.FAIL if report.when == "call" else Outcome.ERROR
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped:
        return Outcome.KNOWN_FAIL if expected_to_fail else Outcome.NOT_EXERCISED
    if report.when != "call":
        return None
    return Outcome.UNEXPECTED_PASS if expected_to_fail else Outcome.PASS


def _message(report: pytest.TestReport) -> str:
    """One line: why it failed or was skipped."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{report.nodeid}: {crash.message.partition(chr(10))[0]}"
    if isinstance(report.longrepr, tuple):
        return f"{report.nodeid}: {report.longrepr[2]}"
    return report.nodeid
