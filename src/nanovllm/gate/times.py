"""Base and head, interleaved; red is what the variation measured meanwhile cannot explain.

Whatever else a machine does only ever adds time, so a run's time is that of its fastest round. A
repeat runs base, head, head, base: a drift favours neither, and how far two runs of one tree are
apart is the variation. A slowdown counts in a repeat if it is beyond 10 % and beyond five times the
variation; a benchmark is red if that happens in two of three repeats, so one odd moment is not red.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from nanovllm.gate.suite import GateError, Times

ALLOWED = 0.10
"""Slowdown that is never red."""
VARIATIONS = 5.0
"""Times the variation that a slowdown has to exceed."""
MOST_ALLOWED = 0.40
"""However much the runs vary, a slowdown beyond this is red."""
REPEATS = 3
SLOW_REPEATS = 2
"""Slow repeats that are red."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Both trees, each run twice."""

    base: tuple[Times, Times]
    head: tuple[Times, Times]

    @property
    def runs(self) -> tuple[Times, ...]:
        return (*self.base, *self.head)

    def ratio(self, name: str) -> float:
        base, head = (min(run[name] for run in runs) for runs in (self.base, self.head))
        return head / base

    def variations(self, name: str) -> list[float]:
        pairs = (sorted(run[name] for run in runs) for runs in (self.base, self.head))
        return [slower / faster - 1 for faster, slower in pairs]


@dataclass(frozen=True, slots=True)
class Row:
    """One benchmark's comparison.

    Attributes:
        ratios: head over base, one a repeat.
        variation: the median of how far two runs of one tree were apart.
    """

    name: str
    ratios: tuple[float, ...]
    variation: float

    @property
    def limit(self) -> float:
        return 1 + min(max(ALLOWED, VARIATIONS * self.variation), MOST_ALLOWED)

    @property
    def num_slow(self) -> int:
        return sum(ratio > self.limit for ratio in self.ratios)

    @property
    def is_slower(self) -> bool:
        return self.num_slow >= SLOW_REPEATS

    def __str__(self) -> str:
        ratios = " ".join(f"{ratio:.3f}" for ratio in self.ratios)
        verdict = "RED  " if self.is_slower else "green"
        return (
            f"{verdict} {self.name}\n      head/base {ratios}, limit {self.limit:.3f}"
            f" (variation {self.variation:.1%})"
        )


def compare(
    repeats: Sequence[Repeat], added: Collection[str] = (), removed: Collection[str] = ()
) -> list[Row]:
    """A row for each benchmark of the base.

    Args:
        added: benchmarks that only the head has, on purpose; `removed`: that only the base has.

    GateError if the sets of benchmarks differ in any other way.
    """
    names = _common_names(repeats, set(added), set(removed))
    rows = []
    for name in names:
        variations = [apart for repeat in repeats for apart in repeat.variations(name)]
        ratios = tuple(repeat.ratio(name) for repeat in repeats)
        rows.append(Row(name, ratios, median(variations)))
    return rows


def _common_names(repeats: Sequence[Repeat], added: set[str], removed: set[str]) -> list[str]:
    base, head = set(repeats[0].base[0]), set(repeats[0].head[0])
    for repeat in repeats:
        for runs, names in ((repeat.base, base), (repeat.head, head)):
            if any(set(run) != names for run in runs):
                raise GateError("two runs of one tree timed different benchmarks")
    _expect_difference("the base lacks", head - base, added, "added")
    _expect_difference("the head lacks", base - head, removed, "removed")
    if not base & head:
        raise GateError("base and head share no benchmark: there is nothing to compare")
    return sorted(base & head)


def _expect_difference(what: str, found: set[str], said: set[str], option: str) -> None:
    if unsaid := sorted(found - said):
        raise GateError(f"{what} {', '.join(unsaid)}; if that is meant, say --{option} for each")
    if wrong := sorted(said - found):
        raise GateError(f"--{option} {', '.join(wrong)}: it is not so")


def repeats_of(run: Callable[[Path], Times], base: Path, head: Path) -> Iterator[Repeat]:
    """Up to three, each measured when it is asked for."""
    for _ in range(REPEATS):
        first, second, third, fourth = (run(tree) for tree in (base, head, head, base))
        yield Repeat((first, fourth), (second, third))


def judge(
    repeats: Iterable[Repeat], added: Collection[str] = (), removed: Collection[str] = ()
) -> list[Row]:
    """Compare; the third repeat is measured only where two do not agree."""
    measured: list[Repeat] = []
    rows: list[Row] = []
    for repeat in repeats:
        measured.append(repeat)
        rows = compare(measured, added, removed)
        if len(measured) >= SLOW_REPEATS and all(row.num_slow != 1 for row in rows):
            break
    return rows
