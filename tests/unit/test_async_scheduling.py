"""One step ahead or not: the same tokens, texts, reasons, and nothing lost."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ahead_or_not import ALPHABET, KINDS, SIZES, late_runners, make_flat_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.conformance.log import check_log
from nanovllm.conformance.verdicts import Outcome
from nanovllm.outputs import RequestOutput


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flat_checkpoint(tmp_path_factory.mktemp("model"))


def random_request(rng: random.Random) -> tuple[str, SamplingParams]:
    prompt = "".join(rng.choices(ALPHABET, k=rng.choice([1, 3, 4, 5, 8, 13, 30])))
    chosen = {"temperature": 2.0, "max_tokens": rng.choice([1, 3, 5, 17]), **rng.choice(KINDS)}
    return prompt, SamplingParams(seed=rng.randrange(100), **chosen)


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(s.token_ids, s.text, s.finish_reason, s.logprobs and len(s.logprobs)) for s in o.samples]
        for o in outputs
    ]


def run(checkpoint: Path, work: list[tuple[str, SamplingParams]], **options: Any) -> list[Any]:
    with LLM(checkpoint, **SIZES | options) as llm:
        outputs = llm.generate([p for p, _ in work], [q for _, q in work], use_tqdm=False)
        stats = llm.stats()
        assert (stats.num_free_blocks, stats.num_running) == (stats.num_blocks, 0)
        assert not llm.scheduler.in_flight
        return told(outputs)


@pytest.mark.spec("SCH-12a", "SCH-12b", "SCH-12c", "STP-3a", "SCH-8")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 64},
        {"num_kvcache_blocks": 16},
        {"num_kvcache_blocks": 16, "max_num_batched_tokens": 5},
        {"num_kvcache_blocks": 16, "max_num_batched_tokens": 5, "scheduling_policy": "mixed"},
        {"num_kvcache_blocks": 16, "enable_prefix_caching": False},
    ],
    ids=["roomy", "tight", "chunks", "mixed", "no cache"],
)
def test_the_same_requests_give_the_same(
    checkpoint: Path, options: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    work = [random_request(rng) for _ in range(12)]
    expected = run(checkpoint, work, **options)
    with late_runners():
        assert run(checkpoint, work, **options) == expected


@pytest.mark.spec("SCH-12c")
def test_the_requests_end_in_every_way(checkpoint: Path) -> None:
    rng = random.Random(0)
    ends = run(checkpoint, [random_request(rng) for _ in range(40)], num_kvcache_blocks=64)
    samples = [sample for samples in ends for sample in samples]
    assert {reason for _, _, reason, _ in samples} == {"length", "stop"}
    assert any(reason == "stop" and ids[-1] in (97, 40) for ids, _, reason, _ in samples)
    assert any(reason == "stop" and ids[-1] not in (97, 40) for ids, _, reason, _ in samples)


@pytest.mark.spec("SCH-8")
def test_blocks_that_run_short_with_a_step_in_flight_preempt_after_it(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    work = [(text, params) for text in ("abcabca", "bcabcab", "cabcabc")]
    tight = {"num_kvcache_blocks": 14}
    with late_runners():
        with LLM(checkpoint, **SIZES | tight) as llm:
            llm.generate([p for p, _ in work], params, use_tqdm=False)
            assert llm.stats().num_preemptions > 0
        assert run(checkpoint, work, **tight) == run(checkpoint, work, num_kvcache_blocks=64)


@pytest.mark.spec("SCH-12c", "SMP-6", "SMP-7")
@pytest.mark.parametrize("extra", [{"logprobs": 1}, {"repetition_penalty": 1.2}, {"top_k": 9}])
def test_a_stop_that_is_known_only_when_the_next_step_is_planned(
    checkpoint: Path, extra: dict[str, Any]
) -> None:
    """The host draws for the step of a row whose request has ended meanwhile."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **extra)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ((tokens, *_),) = run(checkpoint, [("abc", params)])[0]
    third = next(i for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])
    stopped = replace(params, stop_token_ids=(tokens[third],))
    work = [("abc", stopped), ("cab", plain)]
    expected = run(checkpoint, work)
    assert expected[0][0][0] == tokens[: third + 1]
    with late_runners():
        assert run(checkpoint, work) == expected


@pytest.mark.spec("API-5", "SCH-13")
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"repetition_penalty": 1.2}])
def test_a_call_lands_one_step(checkpoint: Path, extra: dict[str, Any]) -> None:
    """Also where a step has to wait for the tokens of the one before, which the host draws."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, **extra)
    with late_runners(), LLM(checkpoint, **SIZES, num_kvcache_blocks=32) as llm:
        for prompt in ("abc", "cab"):
            llm.add_request(prompt, params)
        rows = []
        while not llm.is_finished():
            rows.append(llm.step().num_rows)
        assert rows == [2] * 9


@pytest.mark.spec("SCH-13")
@pytest.mark.parametrize("after", range(5))
def test_an_abort_with_a_step_in_flight(checkpoint: Path, after: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    alone = run(checkpoint, [("cab", params)])
    with late_runners(), LLM(checkpoint, **SIZES, num_kvcache_blocks=32) as llm:
        gone, stays = llm.add_request("abc", params), llm.add_request("cab", params)
        outputs: dict[int, RequestOutput] = {}
        for step in range(40):
            if step == after:
                assert llm.abort_request(gone)
            outputs |= {o.request_id: o for o in llm.step().outputs}
            if llm.is_finished():
                break
        assert outputs[gone].finish_reason == "abort"
        assert told([outputs[stays]]) == alone
        assert llm.stats().num_free_blocks == 32


@pytest.mark.spec("SCH-15")
@pytest.mark.parametrize("where", ["fail_launch", "fail_result"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_step_that_fails_with_another_in_flight(
    checkpoint: Path, where: str, number: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = run(checkpoint, [("aab", params)])
    with late_runners() as runner, LLM(checkpoint, **SIZES, num_kvcache_blocks=32) as llm:
        setattr(runner, where, frozenset({number}))
        outputs = llm.generate(["abc", "cab"], params, use_tqdm=False)
        assert [o.finish_reason for o in outputs] == ["error"] * 2
        assert all("failed" in str(o.error) for o in outputs)
        assert told(llm.generate("aab", params, use_tqdm=False)) == expected
        assert llm.stats().num_free_blocks == 32


@pytest.mark.spec("API-8")
def test_a_reset_waits_for_the_step_in_flight(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with late_runners(), LLM(checkpoint, **SIZES, num_kvcache_blocks=32) as llm:
        llm.add_request("abcabcabc", params)
        for _ in range(4):
            llm.step()
        llm.reset_prefix_cache()
        assert not llm.scheduler.in_flight
        assert llm.stats().num_cached_blocks == 0


@pytest.mark.spec("SCH-5")
def test_the_host_is_a_step_behind(checkpoint: Path) -> None:
    """Otherwise all of the above would show nothing."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with late_runners(), LLM(checkpoint, **SIZES, num_kvcache_blocks=32) as llm:
        llm.add_request("abc", params)
        llm.step()
        assert len(llm.scheduler.in_flight) == 1


@pytest.mark.spec("BLK-8", "KV-5", "PFX-4", "SCH-12d")
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_its_log_passes_the_suite(checkpoint: Path, tmp_path: Path, policy: str) -> None:
    """Every slot that a row reads holds what its request wrote, planned ahead or not."""
    rng = random.Random(1)
    work = [random_request(rng) for _ in range(16)]
    tight = {"num_kvcache_blocks": 16, "max_num_batched_tokens": 8, "scheduling_policy": policy}
    with late_runners():
        run(checkpoint, work, trace=tmp_path / "log.jsonl", **tight)
    log = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(log[0])["hello"]["ahead"] == 1
    verdicts = check_log(log)
    assert not [v for v in verdicts if v.outcome is not Outcome.PASS]
    assert sum(v.evaluations for v in verdicts) > 1000
