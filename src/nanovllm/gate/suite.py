"""Runs a suite on a tree's own sources, and believes only what it can check."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.gate import witness

Times = dict[str, float]
"""Seconds of the fastest round, by the node id of the benchmark."""
Counts = dict[str, dict[str, int]]
"""Numbers by name, by the node id of the test that counted them."""

PLUGIN = "nanovllm_gate_witness"
COUNT = "count:"
"""A test counts with pytest's own fixture: `record_property("count:hashes per prompt", 32)`."""

KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}
"""glibc gives no memory back: how many pages a process has to ask for anew differs between runs of
the same code, and took 40 % of the time of a benchmark of 4 MiB tensors, or nothing."""


class GateError(Exception):
    """No verdict can be given, which is red."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Where the measurements of a project are, and how they run.

    Attributes:
        path: the tests, relative to the root of the tree.
        package: what they measure; it has to come from the tree.
        source: directory of a tree that goes on `PYTHONPATH`.
        python: interpreter with pytest, pytest-benchmark and whatever the package needs.
        timer: what pytest-benchmark's `--benchmark-timer` takes.
        timeout_s: of one run.
    """

    path: str
    package: str
    source: str = "src"
    python: str = sys.executable
    timer: str = "time.process_time"
    timeout_s: float = 600.0

    def times(self, tree: Path) -> Times:
        """Run the benchmarks of `tree`; GateError unless each of its tests is one and was timed."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "benchmarks.json"
            options = (
                f"--benchmark-json={report}",
                f"--benchmark-timer={self.timer}",
                "--benchmark-disable-gc",
            )
            told = self._run(tree, Path(folder), options)
            times = _read_times(report)
        if untimed := sorted(told.keys() - times.keys()):
            raise GateError(f"no benchmark was timed in: {', '.join(untimed)}")
        return times

    def counts(self, tree: Path, hash_seed: int = 0) -> Counts:
        """Run the counting tests of `tree`; GateError unless each of its tests counted."""
        with tempfile.TemporaryDirectory() as folder:
            told = self._run(tree, Path(folder), (), hash_seed)
        return {name: counts_of(name, properties) for name, properties in told.items()}

    @property
    def _interpreter(self) -> str:
        """A path is of the directory that the gate was called in, not of each tree."""
        return os.path.abspath(self.python) if os.sep in self.python else self.python

    def _run(
        self, tree: Path, folder: Path, options: tuple[str, ...], hash_seed: int = 0
    ) -> dict[str, list[tuple[str, Any]]]:
        """Run all tests of the suite: what each recorded, by node id. All have to pass."""
        shutil.copy(witness.__file__, folder / f"{PLUGIN}.py")
        report = folder / "witness.json"
        command = [
            *(self._interpreter, "-m", "pytest", self.path, f"--rootdir={tree}", "-p", PLUGIN),
            *("-q", "-p", "no:randomly", "-p", "no:cacheprovider", *options),
        ]
        path = (str(tree / self.source), str(folder), os.environ.get("PYTHONPATH", ""))
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONHASHSEED": str(hash_seed),
            "OMP_NUM_THREADS": "1",
            **KEPT_MEMORY,
            witness.REPORT: str(report),
            witness.PACKAGE: self.package,
        }
        output = _finish(command, tree, environment, self.timeout_s)
        try:
            told = Told(**json.loads(report.read_text()))
            told.check(self.package, tree / self.source)
        except (OSError, ValueError, TypeError, GateError) as error:
            raise GateError(f"{self.path} of {tree}: {error}\n{output}") from error
        return told.passed


def _outer_environment() -> dict[str, str]:
    """Ours, but for what a pytest that we may run under says of itself: the suite runs alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def _finish(command: list[str], tree: Path, environment: Mapping[str, str], limit: float) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env={**_outer_environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GateError(f"{tree}: not done after {limit:g} s") from error
    except OSError as error:  # no such interpreter, no such tree
        raise GateError(f"{tree}: {command[0]} does not start: {error}") from error
    if done.returncode:
        raise GateError(f"{tree}: pytest ended with {done.returncode}\n{done.stdout}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Told:
    """What the witness wrote."""

    distributed: bool
    passed: dict[str, list[tuple[str, Any]]]
    other: dict[str, str]
    package: list[str | None] = field(default_factory=list)

    def check(self, package: str, source: Path) -> None:
        """GateError unless all tests ran, in one process, on a package of these sources."""
        if self.distributed:
            raise GateError("its tests ran under xdist, where benchmarks are off")
        if self.other:
            each = (f"{name} ({what})" for name, what in sorted(self.other.items()))
            raise GateError(f"not every test ran and passed: {', '.join(each)}")
        if not self.passed:
            raise GateError("it has no test")
        home = source.resolve()
        for place in self.package:
            if place is None or not Path(place).resolve().is_relative_to(home):
                raise GateError(f"{package} is {place}, which is not below {home}")


def _read_times(report: Path) -> Times:
    """Fastest rounds from pytest-benchmark's JSON."""
    try:
        benchmarks = json.loads(report.read_text())["benchmarks"]
        times = {str(b["fullname"]): float(b["stats"]["min"]) for b in benchmarks}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GateError(f"no report of pytest-benchmark: {error!r}") from error
    if len(times) < len(benchmarks):
        raise GateError(f"{len(benchmarks)} benchmarks have {len(times)} names")
    if not all(seconds > 0 for seconds in times.values()):
        raise GateError(f"benchmarks without a duration: {times}")
    return times


def counts_of(test: str, properties: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """What a test counted, by name; GateError if it counted nothing, or not in integers."""
    pairs = [(name.removeprefix(COUNT), n) for name, n in properties if name.startswith(COUNT)]
    counts = dict(pairs)
    if not counts:
        raise GateError(f"{test} counts nothing; it should record_property('{COUNT}...', number)")
    if len(counts) < len(pairs):
        raise GateError(f"{test} counts something twice: {[name for name, _ in pairs]}")
    for name, number in counts.items():
        if type(number) is not int:
            raise GateError(f"{test}: {name} is {number!r}, not an integer")
    return counts
