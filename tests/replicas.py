"""One engine and several for the same requests, and what to compare."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_pool import LocalPool

from nanovllm import LLM, SamplingParams
from nanovllm.data_parallel.llm import DataParallelLLM
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
def single(checkpoint: Path) -> Iterator[LLM]:
    """One engine."""
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def several(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Two engines behind a `DataParallelLLM`."""
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
