"""A run of the suite: parts merged, what is partial, and traces from one run to the next."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.conformance import parts
from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.faulty_story import faulty_story
from nanovllm.conformance.options import RunOptions
from nanovllm.conformance.protocol import Plan
from nanovllm.conformance.report import Report
from nanovllm.conformance.run import Findings, Subject, SuiteRun, open_engine
from nanovllm.conformance.transport import local_door
from nanovllm.conformance.verdicts import Outcome, Verdict


class Fixed:
    """A part of the suite with ready verdicts."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.name = "fixed"
        self.verdicts = verdicts

    def judge(self, subject: Subject, findings: Findings) -> None:
        findings.verdicts += self.verdicts


class Interrupted:
    name = "interrupted"

    def judge(self, subject: Subject, findings: Findings) -> None:
        raise KeyboardInterrupt


def suite(*judges: Any, **options: Any) -> SuiteRun:
    chosen = RunOptions("reference", door=("core",), **options)
    return SuiteRun(chosen, judges, lambda subject, trace: [])


def test_an_interrupted_run_leaves_what_it_had_and_says_that_it_is_partial(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    passed = Fixed(Verdict("SCH-5", Outcome.PASS, 3))
    with pytest.raises(KeyboardInterrupt):
        suite(passed, Interrupted(), report=(path,)).run()
    document = json.loads(path.read_text())
    assert document["complete"] is False
    assert document["summary"]["pass"] == 1
    suite(passed, report=(path,)).run()
    assert json.loads(path.read_text())["complete"] is True


def test_parts_are_merged_and_what_they_leave_out_is_not_exercised(tmp_path: Path) -> None:
    first = Fixed(Verdict("SCH-5", Outcome.PASS, 3), Verdict("SCH-4", Outcome.PASS, 1))
    second = Fixed(Verdict("SCH-5", Outcome.FAIL, 2, "seen"), Verdict("PFX-6", Outcome.FAIL, 1))
    report = suite(first, second, req=("SCH-4", "SCH-5", "SCH-6")).run()
    assert {i: v.outcome for i, v in report.verdicts.items()} == {
        "SCH-4": Outcome.PASS,
        "SCH-5": Outcome.FAIL,
        "SCH-6": Outcome.NOT_EXERCISED,
    }
    assert report.verdicts["SCH-5"].evaluations == 5


def test_the_trace_of_a_failure_is_kept_for_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = {"world": {"block_size": 1}, "operations": []}
    failed = Fixed(Verdict("SCH-5", Outcome.FAIL, 2, "seen", (), trace))
    report = suite(failed, req=("SCH-5",)).run()
    assert report.commands["SCH-5"].endswith("--req SCH-5 --replay .nanovllm/traces/SCH-5.json")
    assert json.loads(Path(".nanovllm/traces/SCH-5.json").read_text()) == trace
    assert Path(".nanovllm/.gitignore").read_text() == "*\n"


class Broken:
    name = "broken"

    def judge(self, subject: Subject, findings: Findings) -> None:
        findings.verdicts.append(Verdict("SCH-4", Outcome.FAIL, 1, "seen before"))
        raise KeyError("lost")


def test_a_part_that_breaks_is_an_error_and_hides_no_failure() -> None:
    passed = Fixed(Verdict("SCH-5", Outcome.PASS, 3))
    report = suite(passed, Broken(), req=("SCH-4", "SCH-5")).run()
    assert report.verdicts["SCH-4"].outcome is Outcome.FAIL
    assert report.verdicts["SCH-5"].outcome is Outcome.ERROR
    assert "KeyError: 'lost'" in report.verdicts["SCH-5"].message


# ---- the whole suite, and its traces ---------------------------------------------------------


class Twice(ReferenceCore):
    """The reference, but for a plan that computes its first row twice (SCH-4)."""

    def schedule(self) -> Plan:
        plan = super().schedule()
        return replace(plan, rows=plan.rows + plan.rows[:1])


def whole_suite(door: Any, **options: Any) -> Report:
    chosen = RunOptions("reference", door=("core",), profile="dev", seed=1, **options)
    parts_of_it = parts.suite_parts()
    return SuiteRun(chosen, parts_of_it, parts.replay, open=lambda _: local_door(door)).run()


def test_the_reference_passes_what_it_is_asked() -> None:
    report = whole_suite(ReferenceCore(), req=("SCH-4", "SCH-5"))
    assert {v.outcome for v in report.verdicts.values()} == {Outcome.PASS}
    assert report.evaluations > 100


def test_a_defect_is_convicted_and_its_trace_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert whole_suite(Twice(), req=("SCH-4",)).verdicts["SCH-4"].outcome is Outcome.FAIL
    trace = Path(".nanovllm/traces/SCH-4.json")
    again = whole_suite(Twice(), req=("SCH-4",), replay=trace)
    assert again.verdicts["SCH-4"].outcome is Outcome.FAIL
    assert again.settings == {"replay": str(trace)}
    assert again.verdicts["SCH-4"].story
    repaired = whole_suite(ReferenceCore(), req=("SCH-4",), replay=trace)
    assert repaired.verdicts["SCH-4"].outcome is Outcome.PASS
    everything = whole_suite(ReferenceCore(), replay=trace)
    assert len(everything.verdicts) > 5
    assert not everything.problems(strict=True)


def test_a_known_failure_is_replayed_until_its_trace_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = tmp_path / "known.toml"
    whole_suite(Twice(), req=("SCH-4",), known_failures_write=known)
    excused = whole_suite(Twice(), req=("SCH-4",), known_failures=known)
    assert excused.verdicts["SCH-4"].outcome is Outcome.KNOWN_FAIL
    assert not excused.problems()
    repaired = whole_suite(ReferenceCore(), req=("SCH-4",), known_failures=known)
    assert repaired.verdicts["SCH-4"].outcome is Outcome.UNEXPECTED_PASS


# ---- what goes wrong without it --------------------------------------------------------------


def test_a_requirement_is_explained_by_an_engine_that_lacks_it() -> None:
    text = faulty_story("SCH-4")
    assert "An engine that gets it wrong" in text
    assert "add r" in text
    assert "block 0" in text


def test_what_no_story_shows_is_explained_without_one() -> None:
    assert faulty_story("MOD-1") == ""


def test_engines_run_on_one_thread_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other would take minutes on a machine that has other work."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    open_engine(RunOptions("reference")).close()
    assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    open_engine(RunOptions("reference")).close()
    assert os.environ["OMP_NUM_THREADS"] == "3"
