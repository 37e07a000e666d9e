"""What becomes of requests when replicas are lost, and what is refused before there are any."""

import logging
import sys
from pathlib import Path

import pytest
from local_pool import LocalPool
from replicas import (
    DRAWN,
    GREEDY,
    OPTIONS,
    PARAMS,
    PROMPTS,
    contents,
    generate,
    pool_of,
    run_to_end,
)

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.data_parallel.actors import check_resources, resources

# ---- losses ----------------------------------------------------------------------------------


def test_requests_of_a_lost_replica_begin_anew_elsewhere(
    several: LLM, single: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(several)
    pool.deaths = {0: 3}
    with caplog.at_level(logging.WARNING):
        outputs = generate(several, PROMPTS, PARAMS)
    assert contents(outputs) == contents(generate(single, PROMPTS, PARAMS))
    assert several.losses == {0: "planted"}
    assert pool.ended == [0]
    assert set(pool.sent[0]) < set(pool.sent[1])
    assert f"replica 0 is lost (planted); of its {len(pool.sent[0])} requests" in caplog.text
    assert [o.finish_reason for o in generate(several, PROMPTS, GREEDY)] == ["length"] * 7
    assert len(several.replica_stats()) == 1


def test_a_request_that_loses_two_replicas_ends_with_both_causes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.data_parallel.llm.RayPool", LocalPool)
    with LLM(checkpoint, data_parallel_size=3, **OPTIONS) as llm:
        pool_of(llm).deaths = {0: 1, 1: 2}
        params = SamplingParams(max_tokens=30, ignore_eos=True, n=2)
        outputs = generate(llm, [[i] * 4 for i in range(6)], params)
        failed = [output for output in outputs if output.finish_reason == "error"]
        assert failed
        assert len(failed) < 6
        both = "lost with its replica; replica 0: planted; replica 1: planted"
        assert all([sample.error for sample in o.samples] == [both, both] for o in failed)
        assert llm.losses.keys() == {0, 1}
        assert [o.finish_reason for o in generate(llm, PROMPTS, GREEDY)] == ["length"] * 7


@pytest.mark.spec("TP-4")
def test_when_none_is_left_everything_ends_and_is_refused(several: LLM) -> None:
    pool_of(several).deaths = {0: 1, 1: 1}
    own = several.add_request([1], GREEDY)
    outputs = generate(several, PROMPTS, DRAWN)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert [output.request_id for output in several.step().outputs] == [own]
    for call in (
        several.step,
        several.stats,
        lambda: several.add_request([1]),
        several.is_finished,
    ):
        with pytest.raises(RuntimeError, match="no replica is left: replica 0: planted; replica 1"):
            call()


def test_what_was_to_be_aborted_is_not_tried_elsewhere(several: LLM) -> None:
    ids = [several.add_request([k] * 5, DRAWN) for k in range(2)]
    pool_of(several).deaths = {0: 0}
    assert several.abort_request(ids[0])
    outputs = run_to_end(several)
    assert [outputs[i].finish_reason for i in ids] == ["abort", "length"]
    assert pool_of(several).sent == {0: [0], 1: [1]}


@pytest.mark.spec("TP-4")
def test_an_engine_that_fails_for_good_is_a_loss(several: LLM, single: LLM) -> None:
    ids = [several.add_request(prompt, DRAWN) for prompt in PROMPTS]
    assert not [output for _ in range(4) for output in several.step().outputs]
    pool_of(several).replicas[1].llm.model_runner.fault = "the device is gone"
    outputs = run_to_end(several)
    assert several.losses == {1: "the device is gone"}
    expected = generate(single, PROMPTS, DRAWN)
    assert contents(outputs[i] for i in ids) == contents(expected)


# ---- Ray's part that needs no Ray ------------------------------------------------------------


def test_without_ray_it_says_what_to_install(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'nanovllm\[ray\]'"):
        LLM(checkpoint, data_parallel_size=2)


def test_a_derived_class_is_no_front(checkpoint: Path) -> None:
    class Derived(LLM):
        pass

    with pytest.raises(ValueError, match="data_parallel_size=2 engines are made by `LLM` itself"):
        Derived(checkpoint, data_parallel_size=2)


def test_what_a_replica_takes() -> None:
    on_gpus = resources(Config(device="cuda", tensor_parallel_size=2))
    assert on_gpus == {"CPU": 2, "GPU": 2}
    assert resources(Config(device="cpu")) == {"CPU": 1, "GPU": 0}
    check_resources(on_gpus, 2, {"CPU": 4.0, "GPU": 4.0})
    with pytest.raises(ValueError, match="takes 6 GPUs, 2 a replica, but Ray has 4"):
        check_resources(on_gpus, 3, {"CPU": 64.0, "GPU": 4.0})
    with pytest.raises(ValueError, match="takes 2 GPUs, 2 a replica, but Ray has 0"):
        check_resources(on_gpus, 1, {"CPU": 64.0})
