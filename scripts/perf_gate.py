"""Regression gate: the benchmarks of a base revision and of this tree, interleaved in one job.

    python scripts/perf_gate.py [--base REV]

Each repeat runs `tests/perf/test_gate.py` of both trees, one after the other, timed in CPU seconds
of the process. Whatever else the machine does only ever adds time, so a benchmark's time is that of
its fastest round over all repeats, and its noise is how far the second fastest repeat is from the
fastest. Repeats go on until the noise is small or there were enough. Red is a ratio head / base
beyond 10 % and beyond the noise. The gate fails closed: a run that fails, a benchmark that is gone,
or nothing to compare is red, too. Exit code 0 is green, 1 red.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = "tests/perf/test_gate.py"
ALLOWED = 0.10
"""Slowdown that is never red."""
NOISE_FACTOR = 3.0
"""Times the noise that a slowdown has to exceed."""
MOST_ALLOWED = 0.40
"""However noisy, a slowdown beyond this is red."""
QUIET = 0.03
"""Noise at which no more repeats are needed: they would not change the limit."""
MIN_REPEATS, MAX_REPEATS = 3, 8

Times = dict[str, float]
"""Seconds of the fastest round, by benchmark."""


class GateError(Exception):
    """No verdict can be given, which is red."""


@dataclass(frozen=True)
class Row:
    """One benchmark's comparison: fastest round of the head over that of the base."""

    name: str
    ratio: float
    noise: float

    @property
    def limit(self) -> float:
        return 1 + min(max(ALLOWED, NOISE_FACTOR * self.noise), MOST_ALLOWED)

    @property
    def is_slower(self) -> bool:
        return self.ratio > self.limit

    def __str__(self) -> str:
        verdict = "RED  " if self.is_slower else "green"
        return f"{verdict} {self.name:32} head/base {self.ratio:.3f}  limit {self.limit:.3f}"


def best_and_noise(runs: list[Times], name: str) -> tuple[float, float]:
    best, second = sorted(run[name] for run in runs)[:2]
    return best, second / best - 1


def compare(base: list[Times], head: list[Times]) -> list[Row]:
    """Rows of all benchmarks of the base, from two repeats or more.

    GateError if a run lacks one, or there is none.
    """
    names = set(base[0]) if base else set()
    if not names:
        raise GateError("the base ran no benchmark: there is nothing to compare")
    for run in (*base, *head):
        if missing := sorted(names - set(run)):
            raise GateError(f"missing benchmarks: {', '.join(missing)}")
    rows = []
    for name in sorted(names):
        (base_best, base_noise), (head_best, head_noise) = (
            best_and_noise(runs, name) for runs in (base, head)
        )
        rows.append(Row(name, head_best / base_best, max(base_noise, head_noise)))
    return rows


def read_times(report: Path) -> Times:
    """Fastest rounds from pytest-benchmark's JSON."""
    benchmarks = json.loads(report.read_text())["benchmarks"]
    times = {entry["name"]: float(entry["stats"]["min"]) for entry in benchmarks}
    if not all(seconds > 0 for seconds in times.values()):
        raise GateError(f"benchmarks without a duration: {times}")
    return times


def run_benchmarks(tree: Path) -> Times:
    """Run a tree's own benchmarks on its own sources."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"),
            *(BENCHMARKS, f"--rootdir={tree}", "--benchmark-only", "--benchmark-disable-gc"),
            *("--benchmark-timer=time.process_time", f"--benchmark-json={report}"),
        ]
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode or not report.exists():
            raise GateError(f"benchmarks of {tree} failed:\n{done.stdout}{done.stderr}")
        return read_times(report)


@contextmanager
def checkout(revision: str, repository: Path) -> Iterator[Path]:
    """A work tree of the revision, removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ("git", "-C", str(repository), "worktree")
        added = subprocess.run(
            [*git, "add", "--detach", tree, revision], capture_output=True, text=True, check=False
        )
        if added.returncode:
            raise GateError(
                f"no work tree of {revision}: {added.stderr.strip()}\nThe gate needs the history: "
                "fetch it, or name a revision that is here in NANOVLLM_GATE_BASE."
            )
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True, capture_output=True)


def gate(base: Path, head: Path) -> bool:
    """Print the comparison; whether it is green."""
    base_runs: list[Times] = []
    head_runs: list[Times] = []
    rows: list[Row] = []
    for repeat in range(MAX_REPEATS):
        # Swapped every other time, so that a drift of the machine favours neither.
        pair = [(base_runs, base), (head_runs, head)]
        for runs, tree in pair if repeat % 2 == 0 else reversed(pair):
            runs.append(run_benchmarks(tree))
        if repeat + 1 >= MIN_REPEATS:
            rows = compare(base_runs, head_runs)
            if all(row.noise <= QUIET for row in rows):
                break
    print("\n".join(str(row) for row in rows))
    print(f"{len(base_runs)} repeats")
    return not any(row.is_slower for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", default=os.environ.get("NANOVLLM_GATE_BASE", "HEAD~1"))
    parser.add_argument("--base-tree", type=Path, help="a directory instead of a revision")
    parser.add_argument("--head-tree", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args()
    try:
        if options.base_tree:
            green = gate(options.base_tree.resolve(), options.head_tree.resolve())
        else:
            with checkout(options.base, options.head_tree) as tree:
                green = gate(tree, options.head_tree.resolve())
    except (GateError, subprocess.CalledProcessError) as error:
        print(f"RED   {error}")
        return 1
    print("gate: green" if green else "gate: RED")
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
