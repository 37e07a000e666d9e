"""The runner of CUDA, on a CPU: what it remembers of sequences, and mails, is theirs."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import put_on_cuda

from nanovllm import LLM, SamplingParams
from nanovllm.engine.cuda_runner import CudaModelRunner

Ids = list[int]
OpenLLM = Callable[..., LLM]

PROMPTS = [[5, 6, 7, 8], [40, 41, 42, 43], [80, 81, 82, 83]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.fixture
def open_llm(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> OpenLLM:
    def open_it(**options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "skip_tokenizer": True,
            "device": "cpu",
            "enforce_eager": True,
            "kvcache_block_size": 4,
            "num_kvcache_blocks": 40,
            "max_num_seqs": 4,
        }
        return LLM(checkpoint, **defaults | options)

    return open_it


@pytest.fixture
def expected(open_llm: OpenLLM) -> list[Ids]:
    with open_llm() as llm:
        return generate(llm)


@pytest.fixture
def on_cuda(expected: list[Ids], monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on; what is expected comes from the runner of a CPU."""
    put_on_cuda(monkeypatch)


def generate(llm: LLM, prompts: list[Ids] = PROMPTS) -> list[Ids]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def drain(llm: LLM) -> dict[int, Ids]:
    found = {}
    for _ in range(100):
        found |= {output.request_id: output.token_ids for output in llm.step().outputs}
        if llm.is_finished():
            return found
    raise AssertionError("100 steps were not enough")


@pytest.mark.spec("GRF-5", "SCH-4")
@pytest.mark.parametrize("max_num_seqs", [3, 4, 7, 8])
@pytest.mark.parametrize("ahead", [False, True])
def test_it_computes_what_the_other_one_does(
    open_llm: OpenLLM, expected: list[Ids], on_cuda: None, max_num_seqs: int, ahead: bool
) -> None:
    """Whatever number of steps it did to get ready."""
    with open_llm(max_num_seqs=max_num_seqs, async_scheduling=ahead) as llm:
        assert isinstance(llm.model_runner, CudaModelRunner)
        assert generate(llm) == expected
        llm.reset_prefix_cache()
        assert generate(llm) == expected


@pytest.mark.spec("SMP-3a", "SMP-3b", "SMP-3c", "SMP-4")
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 0.5, "top_k": 5},
        {"logprobs": 2, "top_p": 0.7},
    ],
    ids=str,
)
def test_it_draws_what_the_other_one_does(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """The host's sampler has the same filters and the same noise."""
    sampled = SamplingParams(temperature=1.0, max_tokens=14, seed=7, ignore_eos=True, **params)
    found = []
    for _ in range(2):
        with open_llm() as llm:
            outputs = llm.generate(PROMPTS, sampled, use_tqdm=False)
        found.append([output.token_ids for output in outputs])
        put_on_cuda(monkeypatch)
    assert found[0] == found[1]


@pytest.mark.spec("SCH-15")
def test_an_interrupt_between_a_launch_and_its_count_costs_that_step_only(
    open_llm: OpenLLM, expected: list[Ids], on_cuda: None
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with open_llm() as llm:
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
        for _ in range(5):
            llm.step()
        inputs = llm.model_runner.inputs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inputs, "launched", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        drain(llm)
        llm.reset_prefix_cache()
        assert generate(llm) == expected


@pytest.mark.spec("SCH-15")
def test_an_interrupt_between_a_launch_and_its_flight_costs_that_step_only(
    open_llm: OpenLLM, expected: list[Ids], on_cuda: None
) -> None:
    class Flights(deque[Any]):
        def append(self, flight: Any) -> None:
            if flight[0].step_id == 6:
                raise KeyboardInterrupt
            super().append(flight)

    with open_llm() as llm:
        llm._steps._flights = Flights()
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
        with pytest.raises(KeyboardInterrupt):
            drain(llm)
        drain(llm)
        llm.reset_prefix_cache()
        assert generate(llm) == expected


@pytest.mark.spec("SCH-8", "KV-1")
def test_one_that_comes_back_to_another_seat_brings_its_token(
    open_llm: OpenLLM, expected: list[Ids], on_cuda: None
) -> None:
    """Two are preempted; the older one is aborted, so that the newer one gets its seat."""
    with open_llm(async_scheduling=False) as llm:
        requests = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        scheduler = llm.scheduler
        while len(scheduler.running) < 3 or scheduler.running[2].num_tokens < 9:
            llm.step()
        _, older, newer = scheduler.running
        for seq in (newer, older):
            scheduler._preempt(seq)
            llm.model_runner.forget([seq])
        llm.abort_request(older.seq_id)
        assert drain(llm)[requests[2]] == expected[2]
