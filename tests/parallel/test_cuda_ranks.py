"""What ranks on CUDA tell each other, on a CPU: seats, lengths, and rank 0's tokens."""

import os
import signal
from pathlib import Path

import pytest
from cuda_on_cpu import build_cuda_on_cpu, run_on_cpu
from tp_engines import pids, ranks_of, wait_for_fault

from nanovllm import LLM, SamplingParams
from nanovllm.engine.tensor_parallel import start
from nanovllm.engine.tensor_parallel.cuda_leading import LeadingCudaRunner
from nanovllm.engine.tensor_parallel.ranks import Ranks

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPTS = [[(7 * i + j) % 300 for j in range(9 + 6 * i)] for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=4, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=4, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=4, presence_penalty=1, max_tokens=12, ignore_eos=True),
]
CASES = {
    "one step at a time": {"async_scheduling": False},
    "a step ahead": {},
    "preemption, chunks, mixed steps": {
        "scheduling_policy": "mixed",
        "max_num_batched_tokens": 24,
        "max_num_seqs": 6,
        "num_kvcache_blocks": 24,
    },
}


@pytest.fixture
def two_ranks_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(start, "build_runner", build_cuda_on_cpu)
    monkeypatch.setattr(start, "leading_class", lambda captures: LeadingCudaRunner)


def outputs(llm: LLM) -> list[list[int]]:
    found = []
    for params in PARAMS:
        found += [o.token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    return found


@pytest.mark.spec("TP-1", "TP-8")
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_go_on_with_the_tokens_of_rank_0(
    checkpoint: Path, two_ranks_of_cuda, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The other one draws, too, and what it draws is wrong."""
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 400, "enforce_eager": True}
    options |= CASES[case]
    with LLM(checkpoint, **options) as llm:
        expected = outputs(llm)
    with LLM(checkpoint, tensor_parallel_size=2, **options) as llm:
        told = spy(ranks_of(llm), monkeypatch)
        assert outputs(llm) == expected
        assert bool(llm.stats().num_preemptions) == ("preemption" in case)
    assert set(told) == {"update", "compute_logits", "decode", "keep_tokens"}


def spy(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by what the ranks are told to call."""
    methods: list[str] = []
    real = ranks.told

    def told(method: str, *args: object):
        methods.append(method)
        return real(method, *args)

    monkeypatch.setattr(ranks, "told", told)
    return methods


@pytest.mark.spec("TP-4")
def test_a_rank_is_killed_with_a_step_in_flight(checkpoint: Path, two_ranks_of_cuda) -> None:
    """The step behind it was launched before anybody knew; its tokens do not count."""
    with LLM(checkpoint, tensor_parallel_size=2, enforce_eager=True, num_kvcache_blocks=50) as llm:
        requests = [llm.add_request(prompt, PARAMS[0]) for prompt in PROMPTS[:3]]
        llm.step()
        assert len(llm.scheduler.in_flight) == 1
        os.kill(pids(llm)[0], signal.SIGKILL)
        assert wait_for_fault(llm) == "rank 1 was killed by SIGKILL"
        outputs = {output.request_id: output for output in llm.step().outputs}
        for request in requests:
            assert outputs[request].samples[0].error == "rank 1 was killed by SIGKILL"
            assert len(outputs[request].token_ids) == 1
        with pytest.raises(RuntimeError, match="this engine has failed: rank 1 was killed"):
            llm.step()
