"""Verdicts of the gate on given times."""

import pytest

from nanovllm.gate.suite import GateError, Times
from nanovllm.gate.times import Repeat, compare, judge, repeats_of

QUIET = {"a": 1.0, "b": 5.0}
pytestmark = pytest.mark.spec("PRF-2")


def scaled(times: Times, factor: float) -> Times:
    return {name: seconds * factor for name, seconds in times.items()}


def repeat(head: float = 1.0, *, apart: float = 0.01, base: Times = QUIET) -> Repeat:
    """Both trees vary by `apart`; the head's times are the base's times `head`."""
    runs = base, scaled(base, 1 + apart)
    return Repeat(runs, (scaled(runs[1], head), scaled(runs[0], head)))


@pytest.mark.parametrize(("factor", "slower"), [(0.5, False), (1.0, False), (1.09, False)])
def test_what_is_not_slower_is_green(factor: float, slower: bool) -> None:
    rows = compare([repeat(factor)] * 3)
    assert [row.name for row in rows] == ["a", "b"]
    assert [row.is_slower for row in rows] == [slower] * 2


def test_only_the_benchmark_that_became_slower_is_red() -> None:
    slow_a = Repeat((QUIET, QUIET), (QUIET | {"a": 1.5}, QUIET | {"a": 1.51}))
    a, b = compare([slow_a, slow_a])
    assert (a.is_slower, b.is_slower) == (True, False)
    assert str(a).startswith("RED")
    assert "1.500" in str(a)


def test_two_slow_repeats_of_three_are_red_and_one_is_not() -> None:
    slow, same = repeat(1.2), repeat()
    assert not any(row.is_slower for row in compare([same, slow, same]))
    assert all(row.is_slower for row in compare([slow, same, slow]))


def test_variation_widens_the_limit() -> None:
    (row, _) = compare([repeat(apart=0.01)] * 3)
    assert row.limit == pytest.approx(1.10)
    (row, _) = compare([repeat(1.2, apart=0.05)] * 3)
    assert row.limit == pytest.approx(1.25)
    assert not row.is_slower


def test_a_slowdown_of_a_half_is_red_whatever_the_variation() -> None:
    assert all(row.is_slower for row in compare([repeat(1.5, apart=0.9)] * 3))


def test_one_odd_run_is_no_variation_and_no_slowdown() -> None:
    odd = Repeat((QUIET, QUIET), (QUIET, scaled(QUIET, 3.0)))
    (row, _) = compare([odd, repeat(), repeat()])
    assert not row.is_slower
    assert row.limit == pytest.approx(1.10)


@pytest.mark.parametrize(
    ("first", "second", "measured"), [(1.0, 1.0, 2), (1.2, 1.2, 2), (1.2, 1.0, 3), (1.0, 1.2, 3)]
)
def test_a_third_repeat_settles_what_two_do_not(first: float, second: float, measured: int) -> None:
    asked: list[Repeat] = []
    repeats = [repeat(first), repeat(second), repeat()]
    judge(asked.append(r) or r for r in repeats)
    assert len(asked) == measured


def test_trees_take_turns() -> None:
    turns: list[str] = []
    list(repeats_of(lambda tree: turns.append(tree) or QUIET, "base", "head"))
    assert turns == ["base", "head", "head", "base"] * 3


def test_other_benchmarks_are_red_unless_that_is_meant() -> None:
    only_a = {"a": 1.0}
    gone, new = Repeat((QUIET,) * 2, (only_a,) * 2), Repeat((only_a,) * 2, (QUIET,) * 2)
    for pair, said, words in (
        (gone, {}, "the head lacks b.*--removed"),
        (new, {}, "the base lacks b.*--added"),
        (gone, {"added": ["b"]}, "added b: it is not so"),
        (repeat(), {"removed": ["b"]}, "it is not so"),
        (Repeat((only_a,) * 2, ({"z": 1.0},) * 2), {}, "the base lacks z"),
        (Repeat((QUIET, only_a), (QUIET,) * 2), {}, "two runs of one tree"),
        (Repeat((QUIET,) * 2, (QUIET, only_a)), {}, "two runs of one tree"),
        (Repeat(({},) * 2, ({},) * 2), {}, "nothing to compare"),
    ):
        with pytest.raises(GateError, match=words):
            compare([pair] * 2, **said)
    assert [row.name for row in compare([gone] * 2, removed=["b"])] == ["a"]
    assert [row.name for row in compare([new] * 2, added=["b"])] == ["a"]
