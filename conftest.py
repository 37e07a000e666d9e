"""Shared test set-up: every test carries the marker of the folder it lives in."""

from pathlib import Path

import pytest

SUITES = ("unit", "property", "gpu", "perf", "equality")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent / "tests"
    for item in items:
        if item.path.is_relative_to(tests):
            suite = item.path.relative_to(tests).parts[0]
            if suite in SUITES:
                item.add_marker(suite)
