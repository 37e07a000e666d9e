"""An engine that logs is judged from its log alone; ours writes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import SchedulerConfig
from nanovllm.conformance.log import check_log
from nanovllm.conformance.verdicts import Outcome, Verdict
from nanovllm.engine.trace_log import TracedScheduler, TraceLog


def scheduler(path: Path, **options: Any) -> TracedScheduler:
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 40} | options
    config = SchedulerConfig(
        **limits, num_kvcache_blocks=8, kvcache_block_size=2, eos_token_ids=frozenset({0}), seed=0
    )
    return TracedScheduler(config, TraceLog(path))


def step(scheduler: TracedScheduler, token: int = 7, **outcome: Any) -> None:
    step = scheduler.schedule()
    rows = [row for row in step.rows if row.samples and row.seq.seq_id not in outcome]
    if step.rows:
        scheduler.commit(step, {row.seq.seq_id: token for row in rows}, **outcome)


@pytest.fixture
def log(tmp_path: Path) -> list[str]:
    """Hits, preemption, samples, an abort in flight, NaN, a step that raises, a stop string."""
    engine = scheduler(tmp_path / "log.jsonl")
    engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
    engine.add([1, 2, 3, 4, 6], SamplingParams(max_tokens=4, n=2), salt="red")
    for _ in range(3):
        step(engine)
    while not engine.is_finished():
        step(engine)
    engine.add([1, 2, 3, 4, 5, 7, 1], SamplingParams(max_tokens=4, stop=["x"]))
    step(engine, 8)
    (seq,) = engine.running
    engine.commit(engine.schedule(), {seq.seq_id: 9}, stopped=[seq.seq_id])
    (seq,) = engine.add([3], SamplingParams(max_tokens=4))
    engine.commit(engine.schedule(), {}, failed={seq.seq_id: "NaN"})
    (seq,) = engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    planned = engine.schedule()
    assert engine.abort(seq.seq_id)
    assert not engine.abort(seq.seq_id)
    engine.commit(planned, {seq.seq_id: 7})
    (seq,) = engine.add([5, 5, 5], SamplingParams(max_tokens=4))
    engine.fail_step(engine.schedule(), "out of memory")
    engine.reset_prefix_cache()
    engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
    step(engine, 0)
    assert engine.is_finished()
    return (tmp_path / "log.jsonl").read_text().splitlines()


@pytest.fixture
def ahead(tmp_path: Path) -> list[str]:
    """Two requests decode, a third one's step raises with theirs in flight behind it."""
    engine = scheduler(tmp_path / "log.jsonl", max_steps_in_flight=2)
    first, second = (engine.add([1, 2, i], SamplingParams(max_tokens=4))[0] for i in (3, 4))
    step(engine)
    engine.add([5, 6, 7], SamplingParams(max_tokens=4))
    failing, landing = engine.schedule(), engine.schedule()
    assert len(failing.rows) == 1
    assert {row.seq for row in landing.rows} >= {first, second}
    engine.fail_step(failing, "out of memory")
    engine.commit(landing, {seq.seq_id: 7 for seq in (first, second)})
    while not engine.is_finished():
        step(engine)
    return (tmp_path / "log.jsonl").read_text().splitlines()


def failures(verdicts: list[Verdict]) -> dict[str, str]:
    return {v.spec_id: v.message for v in verdicts if v.outcome is not Outcome.PASS}


def changed(log: list[str], op: str, change: Callable[[dict[str, Any]], None]) -> list[str]:
    """The last line of this operation changed."""
    index = max(i for i, line in enumerate(log) if json.loads(line).get("op") == op)
    value = json.loads(log[index])
    change(value)
    return [*log[:index], json.dumps(value), *log[index + 1 :]]


@pytest.mark.spec("BLK-8", "PFX-2", "PFX-11", "SCH-15")
def test_a_right_log_passes(log: list[str]) -> None:
    verdicts = check_log(log)
    assert failures(verdicts) == {}
    counted = {v.spec_id for v in verdicts if v.evaluations}
    assert {"BLK-8", "PFX-2", "PFX-11", "PFX-16", "SCH-13", "SCH-15", "FRK-2"} <= counted


@pytest.mark.spec("SCH-15")
def test_a_step_in_flight_behind_one_that_raises_lands(ahead: list[str]) -> None:
    verdicts = check_log(ahead)
    assert failures(verdicts) == {}
    assert "SCH-15" in {v.spec_id for v in verdicts if v.evaluations}
    told = changed(ahead, "fail_step", lambda value: value.update(finished=[]))
    with pytest.raises(ValueError, match=r"line \d+: r2 goes on after step 1, with a row"):
        check_log(told)


@pytest.mark.spec("PFX-4")
def test_a_hit_on_what_was_not_computed_is_convicted(log: list[str]) -> None:
    def start_later(value: dict[str, Any]) -> None:
        row = value["plan"]["rows"][0]
        row.update(start=4, count=1, block_table=[5, 4, 3])

    found = failures(check_log(changed(log, "schedule", start_later)))
    line = len(log)
    assert found["PFX-4"].startswith(f"line {line}: r")
    assert "instead of [1]" in found["PFX-4"] or "PFX-2" in found


@pytest.mark.spec("SCH-12a")
def test_an_end_that_is_not_told_is_convicted(log: list[str]) -> None:
    (verdict,) = check_log(
        changed(log, "commit", lambda value: value.update(finished=[])), {"SCH-12a"}
    )
    assert verdict.outcome is Outcome.FAIL
    assert len(verdict.story) == 14
    assert verdict.story[1] == f"({len(log) - 13} operations before)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: [], "the log is empty"),
        (lambda log: log[1:], "line 1: expected hello and world"),
        (lambda log: [log[0], "{", *log[2:]], "line 2: "),
        (lambda log: [log[0], "7"], "line 2: expected an object, got 7"),
        (lambda log: [log[0], '{"op": "commit", "step": 4}'], "line 2: step 4 ends; in flight is"),
        (lambda log: changed(log, "commit", lambda v: v.update(tokens=[])), "no token for r"),
    ],
)
def test_what_is_no_log_names_the_line(
    log: list[str], change: Callable[[list[str]], list[str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_log(change(log))


def test_nothing_is_kept_of_what_has_ended(tmp_path: Path) -> None:
    engine = scheduler(tmp_path / "log.jsonl")
    waiting = engine.add([1, 2], SamplingParams(max_tokens=2, n=2))
    for seq in reversed(waiting):
        assert engine.abort(seq.seq_id)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line.get("op") for line in lines] == [None, "add", "abort"]
    assert engine._ids == {}
    assert engine._aborted == set()


@pytest.mark.spec("BLK-8", "PFX-2", "SCH-12d")
def test_the_engine_logs_a_run_that_passes(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    prompts = [list(range(5, 8 + 5 * i)) for i in range(8)]
    with LLM(
        trace=path, kvcache_block_size=4, num_kvcache_blocks=24, max_num_seqs=4, max_model_len=64,
        max_num_batched_tokens=32,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, seed=1, n=2), use_tqdm=False)
        next(llm.stream(prompts[:2], SamplingParams(max_tokens=8)))
        llm.reset_prefix_cache()
    lines = path.read_text().splitlines()
    verdicts = check_log(lines)
    assert failures(verdicts) == {}
    logged = [t for line in lines[1:] for _, t in json.loads(line).get("tokens", [])]
    told = [t for output in outputs for sample in output.samples for t in sample.token_ids]
    assert sorted(logged[: len(told)]) == sorted(told)


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-folder"):
        LLM(trace=tmp_path / "no-such-folder" / "log.jsonl", num_kvcache_blocks=4)
