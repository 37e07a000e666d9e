"""The gate's verdicts on given times; its runs of real benchmarks are `make gate` itself."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "perf_gate.py"


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("perf_gate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["perf_gate"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["perf_gate"]


BASE = [{"a": 1.00, "b": 5.0}, {"a": 1.02, "b": 5.1}, {"a": 1.01, "b": 5.0}]


def scaled(runs: list[dict], name: str, factor: float) -> list[dict]:
    return [run | {name: run[name] * factor} for run in runs]


@pytest.mark.spec("PRF-2")
@pytest.mark.parametrize(("factor", "slower"), [(0.5, []), (1.0, []), (1.09, []), (1.5, ["a"])])
def test_a_slowdown_beyond_the_limit_is_red(gate, factor: float, slower: list[str]) -> None:
    rows = gate.compare(BASE, scaled(BASE, "a", factor))
    assert [row.name for row in rows] == ["a", "b"]
    assert [row.name for row in rows if row.is_slower] == slower


@pytest.mark.spec("PRF-2")
def test_one_slow_repeat_is_not_red(gate) -> None:
    head = [BASE[0], BASE[1] | {"b": 9.0}, BASE[2]]
    assert not any(row.is_slower for row in gate.compare(BASE, head))


@pytest.mark.spec("PRF-2")
def test_noise_widens_the_limit(gate) -> None:
    noisy = [{"a": 1.0}, {"a": 1.3}, {"a": 1.1}]
    (row,) = gate.compare(noisy, noisy)
    assert row.limit == pytest.approx(1 + gate.NOISE_FACTOR * 0.1)
    (row,) = gate.compare([{"a": 1.0}, {"a": 1.3}], [{"a": 1.5}, {"a": 1.5}])
    assert row.is_slower, "a slowdown of a half is red whatever the noise"


@pytest.mark.spec("PRF-2")
def test_fails_closed(gate) -> None:
    without_b = [{"a": run["a"]} for run in BASE]
    for base, head, words in (
        (BASE, without_b, "missing benchmarks: b"),
        (BASE, [BASE[0], without_b[1], BASE[2]], "missing benchmarks: b"),
        ([], BASE, "nothing to compare"),
        ([{}] * 3, BASE, "nothing to compare"),
    ):
        with pytest.raises(gate.GateError, match=words):
            gate.compare(base, head)
    # A new benchmark has no base yet.
    assert len(gate.compare(without_b, BASE)) == 1


@pytest.mark.spec("PRF-2")
def test_reports_are_read_and_absurd_ones_refused(gate, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for seconds in (0.25, 0.0):
        entry = {"name": "test_a", "stats": {"min": seconds}}
        report.write_text(json.dumps({"benchmarks": [entry]}))
        if seconds:
            assert gate.read_times(report) == {"test_a": 0.25}
        else:
            with pytest.raises(gate.GateError, match="without a duration"):
                gate.read_times(report)


@pytest.mark.spec("PRF-2")
def test_a_tree_that_runs_nothing_is_an_error(gate, tmp_path: Path) -> None:
    with pytest.raises(gate.GateError, match="failed"):
        gate.run_benchmarks(tmp_path)
