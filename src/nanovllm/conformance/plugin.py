"""The suite inside pytest; the root `conftest.py` loads it.

    pytest --engine nanovllm_like --engine-path DIR --req 'PFX-*' --report x.html

runs the suite on an engine, a requirement being a test, and none of the repository's tests.
Without `--engine` the repository's tests run, and each requirement gets its verdict from those
that name it. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nanovllm.conformance.options import CHOICES, OptionSpec, RunOptions, option_specs

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report

OWN_TESTS = ("req", "level", "report", "strict")
"""Options that mean something without `--engine`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance of an inference engine")
    for spec in option_specs():
        # pytest has a --strict of its own, which sets the same name.
        if spec.field.name != "strict":
            _add_option(group, spec)


def _add_option(group: pytest.OptionGroup, spec: OptionSpec) -> None:
    name = spec.field.name
    details: dict[str, Any] = {"help": spec.help, "dest": name}
    details["type"] = spec.value_type
    details["action"] = "append" if spec.repeats else "store"
    details["choices"] = CHOICES.get(name)
    group.addoption(spec.flag, **details)


def pytest_configure(config: pytest.Config) -> None:
    given = given_options(config)
    if "engine" in given:
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--engine runs in one process: leave out -n")
        from nanovllm.conformance.plugin_engine import EngineTests

        try:
            options = RunOptions(**given)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(EngineTests(config, options), "conformance-engine")
        return
    if foreign := sorted(given.keys() - set(OWN_TESTS)):
        flags = ", ".join("--" + name.replace("_", "-") for name in foreign)
        raise pytest.UsageError(f"{flags}: need --engine")
    from nanovllm.conformance.plugin_own import OwnTests

    config.pluginmanager.register(OwnTests(config, given), "conformance-own-tests")


def given_options(config: pytest.Config) -> dict[str, Any]:
    """Fields of `RunOptions` that the command line names."""
    given: dict[str, Any] = {}
    for spec in option_specs():
        value = config.getoption(spec.field.name, None)
        if value not in (None, False):
            given[spec.field.name] = tuple(value) if spec.repeats else value
    return given


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that names what is no requirement shows nothing."""
    from nanovllm.conformance.registry import validate_markers

    if problems := validate_markers(items):
        raise pytest.UsageError("\n".join(problems))


def print_in_summary(
    reporter: pytest.TerminalReporter, report: Report, *, strict: bool = False
) -> None:
    """The report as on the command line, in the colours that pytest uses."""
    import io

    from rich.console import Console

    from nanovllm.conformance.reports.terminal import print_report

    text = io.StringIO()
    width, colour = reporter._tw.fullwidth, reporter._tw.hasmarkup
    console = Console(file=text, width=width, force_terminal=colour, highlight=False)
    print_report(report, console, strict=strict)
    reporter.section("conformance")
    reporter.write(text.getvalue())


def fail_session(session: pytest.Session, report: Report, *, strict: bool) -> None:
    """What is not green is red in the exit code too, also where no single test fails."""
    green = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if session.exitstatus in green and report.problems(strict=strict):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
