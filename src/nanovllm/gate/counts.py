"""Exact numbers of work, against a baseline that is committed beside the tests that count.

Counts do not vary, so any difference is red until somebody writes the new baseline on purpose, and
then the difference is a line of the change. The file is `{"schema": 1, "counts": {test: {name:
number}}}`; what is counted, on which device, is the tests' affair.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nanovllm.gate.suite import Counts, GateError, Suite

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that is not what the baseline says; None where there is none."""

    test: str
    name: str
    found: int | None
    expected: int | None

    def __str__(self) -> str:
        found, expected = (
            "nothing" if number is None else f"{number:,}" for number in (self.found, self.expected)
        )
        return f"RED   {self.test}\n      {self.name}: {found}, baseline {expected}"


def differences(found: Counts, expected: Counts) -> list[Difference]:
    """All of them, in order of test and name."""
    keys = {
        (test, name) for counts in (found, expected) for test in counts for name in counts[test]
    }
    each = (
        Difference(test, name, found.get(test, {}).get(name), expected.get(test, {}).get(name))
        for test, name in sorted(keys)
    )
    return [difference for difference in each if difference.found != difference.expected]


def read_baseline(path: Path) -> Counts:
    """GateError if there is none, or it holds nothing."""
    try:
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise GateError(f"{path} has schema {content['schema']}, this gate reads {SCHEMA}")
        counts: Counts = content["counts"]
        numbers = [number for each in counts.values() for number in each.values()]
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError("a count is an integer")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GateError(f"no baseline in {path} ({error}); write it with --update") from error
    if not counts:
        raise GateError(f"{path} has no count: there is nothing to compare")
    return counts


def write_baseline(path: Path, suite: Suite, tree: Path) -> Counts:
    """Count twice, with different orders of sets; GateError if that changes a number."""
    first, second = suite.counts(tree, hash_seed=0), suite.counts(tree, hash_seed=1)
    if unsteady := differences(second, first):
        each = ", ".join(f"{d.test} {d.name}: {d.expected}, then {d.found}" for d in unsteady)
        raise GateError(f"numbers that change from run to run cannot be gated: {each}")
    path.write_text(
        json.dumps({"schema": SCHEMA, "counts": first}, indent=2, sort_keys=True) + "\n"
    )
    return first
