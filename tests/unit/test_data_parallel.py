"""The front of several engines, which are in this process: same calls, same tokens."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cli_door import GREEDY_ARGS, POOL_ARGS, invoke
from local_pool import LocalPool
from replicas import (
    GREEDY,
    OPTIONS,
    PARAMS,
    PROMPTS,
    contents,
    generate,
    logprobs,
    pool_of,
    run_to_end,
)

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.data_parallel.llm import DataParallelLLM
from nanovllm.jobs import Job

# ---- one engine and several ------------------------------------------------------------------


@pytest.mark.spec("API-2", "SMP-4", "SMP-6", "FRK-3")
def test_outputs_are_those_of_one_engine(several: LLM, single: LLM) -> None:
    assert isinstance(several, DataParallelLLM)
    for _ in range(2):  # the second time seeds go on where they were, and prefixes hit
        outputs, expected = (generate(engine, PROMPTS, PARAMS) for engine in (several, single))
        assert contents(outputs) == contents(expected)
        assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=1e-4)
        assert len(logprobs(outputs)) >= 3 * 9 * 2
    assert all(pool_of(several).sent.values())


def test_one_replica_is_the_engine_itself(checkpoint: Path) -> None:
    with LLM(checkpoint, data_parallel_size=1, **OPTIONS) as llm:
        assert type(llm) is LLM


@pytest.mark.spec("API-1", "API-2")
def test_texts_and_chats(checkpoint: Path, several: LLM, single: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "Who?")]
    for method, arguments in (("generate", ["one", "two"]), ("chat", chats), ("chat", chats[0])):
        got, expected = (
            getattr(engine, method)(arguments, GREEDY, use_tqdm=False)
            for engine in (several, single)
        )
        assert contents(got) == contents(expected)


@pytest.mark.spec("API-6", "SCH-7c")
def test_bad_requests_are_refused_as_by_one_engine(several: LLM, single: LLM) -> None:
    bad = [[1], [], [300], "x" * 600]
    messages = []
    for engine in (several, single):
        with pytest.raises(ValueError) as raised:
            generate(engine, bad, GREEDY)
        messages.append(str(raised.value))
        with pytest.raises(TypeError, match="cache_salt must be a string"):
            engine.add_request([1], cache_salt=3)
        with pytest.raises(ValueError, match="1 prompts but 2"):
            generate(engine, [[1]], [GREEDY, GREEDY])
        assert engine.is_finished()
    assert messages[0] == messages[1]
    assert not any(pool_of(several).sent.values())


@pytest.mark.spec("API-4", "API-5")
def test_requests_of_others_run_along_and_stay_theirs(several: LLM) -> None:
    own = [several.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
    assert [o.finish_reason for o in generate(several, PROMPTS[3:], GREEDY)] == ["length"] * 4
    assert not several.is_finished()
    first = several.step()
    outputs = {output.request_id for output in first.outputs} | run_to_end(several).keys()
    assert outputs == set(own)
    idle = several.step()
    assert (idle.kind, idle.num_rows, idle.outputs) == ("idle", 0, ())


@pytest.mark.spec("API-5")
def test_steps_add_up(several: LLM, single: LLM) -> None:
    totals = []
    for engine in (several, single):
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
def test_an_abort_ends_a_request_wherever_it_is(several: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, n=2)
    ids = [several.add_request(prompt, long) for prompt in PROMPTS[:4]]
    assert several.abort_request(ids[0])  # no replica knows of it yet
    outputs = {output.request_id: output for _ in range(4) for output in several.step().outputs}
    assert several.abort_request(ids[3])
    outputs |= run_to_end(several)
    assert [outputs[i].finish_reason for i in ids] == ["abort", "length", "length", "abort"]
    assert len(outputs[ids[3]].samples) == 2
    assert not several.abort_request(ids[0])
    assert [several._dispatcher.router.load(i) for i in (0, 1)] == [0, 0]


def test_a_long_prompt_is_less_work_than_a_long_output(several: LLM) -> None:
    """Each is one of three requests; what comes last goes to the replica with less to do."""
    for token, (length, max_tokens) in enumerate(((160, 10), (10, 90), (10, 5))):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=2)
        several.add_request([token] * length, params)
    assert [several._dispatcher.router.load(i) for i in (0, 1)] == [20 + 20 + 10 + 2, 180 + 2]
    run_to_end(several)


@pytest.mark.spec("API-8")
def test_counts_are_sums(several: LLM) -> None:
    generate(several, PROMPTS, GREEDY)
    first, second = several.replica_stats()
    total = several.stats()
    assert total.num_requests == first.num_requests + second.num_requests == len(PROMPTS)
    assert total.num_blocks == 2 * OPTIONS["num_kvcache_blocks"]
    assert total.num_cached_blocks > 0
    several.add_request([1, 2], SamplingParams(n=3))
    assert several.stats().num_waiting == 3
    several.reset_prefix_cache()
    assert several.stats().num_cached_blocks == 0


def test_a_closed_one_refuses_and_a_stream_is_refused(several: LLM) -> None:
    with pytest.raises(ValueError, match="a stream needs a single engine, data_parallel_size=2"):
        several.stream("a")
    several.close()
    several.exit()
    for call in (
        several.step,
        several.stats,
        lambda: several.add_request([1]),
        lambda: generate(several, [1]),
        lambda: generate(several, []),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_an_interrupt_leaves_no_request_behind(
    several: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, answers = pool_of(several), []

    def wait():
        answers.append(0)
        if len(answers) == 3:
            raise KeyboardInterrupt
        return LocalPool.wait(pool)

    monkeypatch.setattr(pool, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        generate(several, PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True))
    assert several.is_finished()
    assert several.stats().num_running == several.stats().num_waiting == 0


@pytest.mark.spec("API-2")
def test_a_job_writes_what_one_engine_writes(several: LLM, single: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [f'{{"prompt": "{c * 5}", "max_tokens": {i + 1}}}' for i, c in enumerate("abcdefgh")]
    source.write_text("\n".join([*lines, "{bad"]))
    for name, engine in (("several", several), ("one", single)):
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
def test_a_shared_prefix_is_computed_once(several: LLM) -> None:
    families = [[[k] * 12 + [i + 1] for i in range(5)] for k in (1, 2)]
    generate(several, [family[0] for family in families], GREEDY)
    outputs = generate(several, [p for family in families for p in family[1:]], GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [12] * 8
    assert [stats.num_requests for stats in several.replica_stats()] == [5, 5]


@pytest.mark.spec("API-8")
def test_a_reset_is_one_for_the_router_as_well(several: LLM) -> None:
    generate(several, [[1] * 12], GREEDY)
    several.reset_prefix_cache()
    generate(several, [[2] * 12, [1] * 12], GREEDY)
    assert pool_of(several).sent == {0: [0, 1], 1: [2]}


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


def test_strangers_are_spread_by_tokens(several: LLM) -> None:
    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (90, 30, 30, 30)]
    generate(several, [[k] * 10 for k in range(4)], params)
    assert pool_of(several).sent == {0: [0], 1: [1, 2, 3]}
