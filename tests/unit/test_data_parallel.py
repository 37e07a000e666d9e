"""The front of several engines, which are in this process: same calls, same tokens, losses."""

import logging
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cli_door import GREEDY_ARGS, POOL_ARGS, invoke
from local_pool import LocalPool

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.data_parallel.actors import check_resources, resources
from nanovllm.data_parallel.llm import DataParallelLLM
from nanovllm.jobs import Job
from nanovllm.outputs import SampleOutput

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, ignore_eos=True)
OPTIONS = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, "max_num_seqs": 4, "seed": 3}
PROMPTS = [[i + 1] * (i + 5) for i in range(7)]
PARAMS = [
    GREEDY,
    DRAWN,
    SamplingParams(max_tokens=9, seed=8, n=3, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=4, top_p=0.9, n=2),
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=12, stop="e"),
    DRAWN,
]


@pytest.fixture
def single(checkpoint: Path):
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nanovllm.data_parallel.llm.RayPool", LocalPool)
    with LLM(checkpoint, data_parallel_size=2, **OPTIONS) as llm:
        yield llm


def pool_of(llm: DataParallelLLM) -> LocalPool:
    return llm._dispatcher.pool


def generate(llm: LLM, *args):
    return llm.generate(*args, use_tqdm=False)


def contents(outputs) -> list[tuple]:
    """All but log probabilities, whose last digits depend on batch mates."""
    return [(o.request_id, o.prompt, o.prompt_token_ids, *map(sample, o.samples)) for o in outputs]


def sample(s: SampleOutput) -> tuple:
    return (s.text, s.token_ids, s.finish_reason, s.error)


def logprobs(outputs) -> list[float]:
    samples = [sample for output in outputs for sample in output.samples if sample.logprobs]
    return [value for s in samples for row in s.logprobs for _, value in row]


def run_to_end(llm: LLM) -> dict[int, object]:
    outputs = {}
    while not llm.is_finished():
        outputs.update((output.request_id, output) for output in llm.step().outputs)
    return outputs


# ---- one engine and several ------------------------------------------------------------------


@pytest.mark.spec("API-2", "SMP-4", "SMP-6", "FRK-3")
def test_outputs_are_those_of_one_engine(llm: LLM, single: LLM) -> None:
    assert isinstance(llm, DataParallelLLM)
    for _ in range(2):  # the second time seeds go on where they were, and prefixes hit
        outputs, expected = (generate(engine, PROMPTS, PARAMS) for engine in (llm, single))
        assert contents(outputs) == contents(expected)
        assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=1e-4)
        assert len(logprobs(outputs)) >= 3 * 9 * 2
    assert all(pool_of(llm).sent.values())


def test_one_replica_is_the_engine_itself(checkpoint: Path) -> None:
    with LLM(checkpoint, data_parallel_size=1, **OPTIONS) as llm:
        assert type(llm) is LLM


@pytest.mark.spec("API-1", "API-2")
def test_texts_and_chats(checkpoint: Path, llm: LLM, single: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "Who?")]
    for method, arguments in (("generate", ["one", "two"]), ("chat", chats), ("chat", chats[0])):
        got, expected = (
            getattr(engine, method)(arguments, GREEDY, use_tqdm=False) for engine in (llm, single)
        )
        assert contents(got) == contents(expected)


@pytest.mark.spec("API-6", "SCH-7c")
def test_bad_requests_are_refused_as_by_one_engine(llm: LLM, single: LLM) -> None:
    bad = [[1], [], [300], "x" * 600]
    messages = []
    for engine in (llm, single):
        with pytest.raises(ValueError) as raised:
            generate(engine, bad, GREEDY)
        messages.append(str(raised.value))
        with pytest.raises(TypeError, match="cache_salt must be a string"):
            engine.add_request([1], cache_salt=3)
        with pytest.raises(ValueError, match="1 prompts but 2"):
            generate(engine, [[1]], [GREEDY, GREEDY])
        assert engine.is_finished()
    assert messages[0] == messages[1]
    assert not any(pool_of(llm).sent.values())


@pytest.mark.spec("API-4", "API-5")
def test_requests_of_others_run_along_and_stay_theirs(llm: LLM) -> None:
    own = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    assert [o.finish_reason for o in generate(llm, PROMPTS[3:], GREEDY)] == ["length"] * 4
    assert not llm.is_finished()
    first = llm.step()
    outputs = {output.request_id for output in first.outputs} | run_to_end(llm).keys()
    assert outputs == set(own)
    idle = llm.step()
    assert (idle.kind, idle.num_rows, idle.outputs) == ("idle", 0, ())


@pytest.mark.spec("API-5")
def test_steps_add_up(llm: LLM, single: LLM) -> None:
    totals = []
    for engine in (llm, single):
        ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        tokens, first = Counter(), []
        while not engine.is_finished():
            step = engine.step()
            tokens["prefill"] += step.num_prefill_tokens
            tokens["decode"] += step.num_decode_tokens
            first += step.first_tokens
        assert sorted(first) == ids
        totals.append(tokens)
    assert totals[0] == totals[1]


@pytest.mark.spec("SCH-13")
def test_an_abort_ends_a_request_wherever_it_is(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, n=2)
    ids = [llm.add_request(prompt, long) for prompt in PROMPTS[:4]]
    assert llm.abort_request(ids[0])  # no replica knows of it yet
    outputs = {output.request_id: output for _ in range(4) for output in llm.step().outputs}
    assert llm.abort_request(ids[3])
    outputs |= run_to_end(llm)
    assert [outputs[i].finish_reason for i in ids] == ["abort", "length", "length", "abort"]
    assert len(outputs[ids[3]].samples) == 2
    assert not llm.abort_request(ids[0])
    assert [llm._dispatcher.router.load(i) for i in (0, 1)] == [0, 0]


@pytest.mark.spec("API-8")
def test_counts_are_sums(llm: LLM) -> None:
    generate(llm, PROMPTS, GREEDY)
    first, second = llm.replica_stats()
    total = llm.stats()
    assert total.num_requests == first.num_requests + second.num_requests == len(PROMPTS)
    assert total.num_blocks == 2 * OPTIONS["num_kvcache_blocks"]
    assert total.num_cached_blocks > 0
    llm.add_request([1, 2], SamplingParams(n=3))
    assert llm.stats().num_waiting == 3
    llm.reset_prefix_cache()
    assert llm.stats().num_cached_blocks == 0


def test_a_closed_one_refuses_and_a_stream_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="a stream needs a single engine, data_parallel_size=2"):
        llm.stream("a")
    llm.close()
    llm.exit()
    for call in (llm.step, llm.stats, lambda: llm.add_request([1]), lambda: generate(llm, [1])):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_an_interrupt_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, answers = pool_of(llm), []

    def wait():
        answers.append(0)
        if len(answers) == 3:
            raise KeyboardInterrupt
        return LocalPool.wait(pool)

    monkeypatch.setattr(pool, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True))
    assert llm.is_finished()
    assert llm.stats().num_running == llm.stats().num_waiting == 0


@pytest.mark.spec("API-2")
def test_a_job_writes_what_one_engine_writes(llm: LLM, single: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [f'{{"prompt": "{c * 5}", "max_tokens": {i + 1}}}' for i, c in enumerate("abcdefgh")]
    source.write_text("\n".join([*lines, "{bad"]))
    for name, engine in (("several", llm), ("one", single)):
        with Job(source, tmp_path / name, {"ignore_eos": True}, model=Path("m")) as job:
            assert len(list(job.run(engine))) == 9
    written = [(tmp_path / name).read_text().replace(name, "") for name in ("several", "one")]
    assert written[0] == written[1]


def test_a_job_on_the_command_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.data_parallel.llm.RayPool", LocalPool)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(f'{{"prompt_token_ids": [{i}]}}' for i in range(1, 6)))
    made = []
    monkeypatch.setattr(LocalPool, "close", lambda pool: made.append(pool))
    result = invoke(
        *("generate", "-i", source, "-o", target, "--model", checkpoint),
        *("--data-parallel-size", 2, *POOL_ARGS, *GREEDY_ARGS),
    )
    assert result.exit_code == 0
    assert len(target.read_text().splitlines()) == 5
    (pool,) = made
    assert sorted(pool.sent[0] + pool.sent[1]) == [0, 1, 2, 3, 4]
    assert all(pool.sent.values())


# ---- routing ---------------------------------------------------------------------------------


@pytest.mark.spec("PFX-5")
def test_a_shared_prefix_is_computed_once(llm: LLM) -> None:
    families = [[[k] * 12 + [i + 1] for i in range(5)] for k in (1, 2)]
    generate(llm, [family[0] for family in families], GREEDY)
    outputs = generate(llm, [p for family in families for p in family[1:]], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [12] * 8
    assert [stats.num_requests for stats in llm.replica_stats()] == [5, 5]


@pytest.mark.spec("API-8")
def test_a_reset_is_one_for_the_router_as_well(llm: LLM) -> None:
    generate(llm, [[1] * 12], GREEDY)
    llm.reset_prefix_cache()
    generate(llm, [[2] * 12, [1] * 12], GREEDY)
    assert pool_of(llm).sent == {0: [0, 1], 1: [2]}


@pytest.mark.spec("SCH-7d")
def test_only_what_every_replica_can_run_is_accepted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unequal(LocalPool):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            small = replace(self.infos[1].limits, num_kvcache_blocks=10)
            self.infos[1] = replace(self.infos[1], limits=small)

    monkeypatch.setattr("nanovllm.data_parallel.llm.RayPool", Unequal)
    with LLM(checkpoint, data_parallel_size=3, **OPTIONS) as llm:
        with pytest.raises(ValueError, match=r"the KV cache holds 40 \(10 blocks of 4\)"):
            llm.add_request([1] * 30, SamplingParams(max_tokens=12))
        llm.add_request([1] * 30, SamplingParams(max_tokens=11))


def test_strangers_are_spread_by_tokens(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (90, 30, 30, 30)]
    generate(llm, [[k] * 10 for k in range(4)], params)
    assert pool_of(llm).sent == {0: [0], 1: [1, 2, 3]}


# ---- losses ----------------------------------------------------------------------------------


def test_requests_of_a_lost_replica_begin_anew_elsewhere(
    llm: LLM, single: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(llm)
    pool.deaths = {0: 3}
    with caplog.at_level(logging.WARNING):
        outputs = generate(llm, PROMPTS, PARAMS)
    assert contents(outputs) == contents(generate(single, PROMPTS, PARAMS))
    assert llm.losses == {0: "planted"}
    assert pool.ended == [0]
    assert set(pool.sent[0]) < set(pool.sent[1])
    assert f"replica 0 is lost (planted); of its {len(pool.sent[0])} requests" in caplog.text
    assert [o.finish_reason for o in generate(llm, PROMPTS, GREEDY)] == ["length"] * 7
    assert len(llm.replica_stats()) == 1


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
def test_when_none_is_left_everything_ends_and_is_refused(llm: LLM) -> None:
    pool_of(llm).deaths = {0: 1, 1: 1}
    own = llm.add_request([1], GREEDY)
    outputs = generate(llm, PROMPTS, DRAWN)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert [output.request_id for output in llm.step().outputs] == [own]
    for call in (llm.step, llm.stats, lambda: llm.add_request([1]), llm.is_finished):
        with pytest.raises(RuntimeError, match="no replica is left: replica 0: planted; replica 1"):
            call()


def test_what_was_to_be_aborted_is_not_tried_elsewhere(llm: LLM) -> None:
    ids = [llm.add_request([k] * 5, DRAWN) for k in range(2)]
    pool_of(llm).deaths = {0: 0}
    assert llm.abort_request(ids[0])
    outputs = run_to_end(llm)
    assert [outputs[i].finish_reason for i in ids] == ["abort", "length"]
    assert pool_of(llm).sent == {0: [0], 1: [1]}


@pytest.mark.spec("TP-4")
def test_an_engine_that_fails_for_good_is_a_loss(llm: LLM, single: LLM) -> None:
    ids = [llm.add_request(prompt, DRAWN) for prompt in PROMPTS]
    assert not [output for _ in range(4) for output in llm.step().outputs]
    pool_of(llm).replicas[1].llm.model_runner.fault = "the device is gone"
    outputs = run_to_end(llm)
    assert llm.losses == {1: "the device is gone"}
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
