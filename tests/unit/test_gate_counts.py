"""The gate of exact numbers: any difference is red until the baseline is written on purpose."""

import json
from pathlib import Path

import pytest

import nanovllm.gate
from nanovllm.gate.counting import calls_into
from nanovllm.gate.counts import differences, read_baseline, write_baseline
from nanovllm.gate.suite import GateError, Suite
from nanovllm.gate.times import Repeat, compare

pytestmark = pytest.mark.spec("PRF-2")
BASELINE = {"test_x": {"hashes": 32, "calls": 7}, "test_y": {"kernels": 1}}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"test_x": {"hashes": 33, "calls": 7}}, "hashes: 33, baseline 32"),
        ({"test_x": {"hashes": 31, "calls": 7}}, "hashes: 31, baseline 32"),
        ({"test_x": {"hashes": 32}}, "calls: nothing, baseline 7"),
        ({"test_x": {"hashes": 32, "calls": 7, "syncs": 0}}, "syncs: 0, baseline nothing"),
    ],
)
def test_each_difference_is_told(found: dict, words: str) -> None:
    (difference,) = differences({**BASELINE, **found}, BASELINE)
    assert words in str(difference)


def test_a_test_that_is_gone_is_a_difference() -> None:
    assert not differences(BASELINE, BASELINE)
    (difference,) = differences({"test_x": BASELINE["test_x"]}, BASELINE)
    assert (difference.test, difference.found) == ("test_y", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no baseline"),
        ("{", "no baseline"),
        ("{}", "no baseline"),
        ('{"schema": 2, "counts": {"a": {"b": 1}}}', "schema 2"),
        ('{"schema": 1, "counts": {}}', "nothing to compare"),
        ('{"schema": 1, "counts": [1]}', "no baseline"),
        ('{"schema": 1, "counts": {"a": 3}}', "no baseline"),
        ('{"schema": 1, "counts": {"a": {"b": []}}}', "no baseline"),
        ('{"schema": 1, "counts": {"a": {"b": 1.5}}}', "no baseline"),
    ],
)
def test_without_a_baseline_it_is_red(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "counts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(GateError, match=words):
        read_baseline(path)


def test_what_is_written_is_read_and_unsteady_numbers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, path = Suite("counts", "tiny"), tmp_path / "counts.json"
    numbers = iter([BASELINE, BASELINE, BASELINE, {"test_x": {"hashes": 5}}])
    monkeypatch.setattr(Suite, "counts", lambda *args, **kwargs: next(numbers))
    write_baseline(path, suite, tmp_path)
    assert read_baseline(path) == BASELINE == json.loads(path.read_text())["counts"]
    with pytest.raises(GateError, match="test_x hashes: 32, then 5"):
        write_baseline(path, suite, tmp_path)


def test_calls_into_a_package_are_counted_by_name() -> None:
    times = {"a": 1.0}, {"a": 1.0}
    with calls_into(nanovllm.gate) as calls:
        compare([Repeat(times, times)] * 2)
    assert calls["compare"] == 1
    assert calls["Repeat.ratio"] == 2
    assert not [name for name in calls if "<locals>" in name]
    before = calls.copy()
    compare([Repeat(times, times)] * 2)
    assert calls == before, "nothing is counted afterwards"
