"""A pytest plugin that runs inside the suite of a gate and tells what really happened there.

One file, standard library only: it is copied beside the report of a run and loaded by
that copy, so that the suite needs nothing of this package, and nothing of it is on its path.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

REPORT = "NANOVLLM_GATE_REPORT"
"""Names the file to write."""
PACKAGE = "NANOVLLM_GATE_PACKAGE"
"""Names the package whose place is told."""


class Witness:
    """Hears what becomes of each test."""

    def __init__(self, config: pytest.Config, report: Path, package: str) -> None:
        self.report = report
        self.package = package
        options = config.option
        self.distributed = bool(getattr(options, "tx", None) or getattr(options, "numprocesses", 0))
        self.passed: dict[str, list[list[Any]]] = {}
        self.other: dict[str, str] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.other.update((item.nodeid, "deselected") for item in items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.other[report.nodeid] = report.outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.other[report.nodeid] = report.outcome
        elif hasattr(report, "wasxfail"):
            self.other[report.nodeid] = "passed, though expected to fail"
        elif report.when == "teardown":
            self.passed[report.nodeid] = [list(pair) for pair in report.user_properties]

    def pytest_sessionfinish(self) -> None:
        module = sys.modules.get(self.package)
        told = {
            "distributed": self.distributed,
            "passed": {name: own for name, own in self.passed.items() if name not in self.other},
            "other": self.other,
            "package": list(getattr(module, "__path__", [])) or [getattr(module, "__file__", None)],
        }
        self.report.write_text(json.dumps(told))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        witness = Witness(config, Path(os.environ[REPORT]), os.environ[PACKAGE])
        config.pluginmanager.register(witness)
