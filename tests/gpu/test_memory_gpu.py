"""Memory of the device: what an engine takes, beside others, and what it gives back (MEM-1..3)."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.engine.cuda_runner import CudaModelRunner
from nanovllm.engine.decode_graphs import graph_batch_sizes
from nanovllm.engine.gpu_memory import SLACK_BYTES

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[i + 1, 2, 3, 4] for i in range(6)]
HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""
OPTIONS = {"skip_tokenizer": True, "max_num_seqs": 64, "max_num_batched_tokens": 4096}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that its logits and activations are tens of MiB."""
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        vocab_size=50_000,
        hidden_size=512,
        intermediate_size=2048,
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1_000_000,
        dtype=torch.bfloat16,
    )


@contextmanager
def another_process_holds(num_bytes: int) -> Iterator[None]:
    command = [sys.executable, "-c", HOLDER, str(num_bytes)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin
    assert holder.stdout
    try:
        assert holder.stdout.readline() == "held\n"
        yield
    finally:
        holder.stdin.close()
        holder.wait()


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def kv_bytes(llm: LLM) -> int:
    return llm.model_runner.num_blocks * llm.model_runner.block_bytes


def answers(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.spec("MEM-1")
def test_the_share_is_used_and_the_largest_step_fits_beside_it(checkpoint: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    before = free_bytes()
    with LLM(checkpoint, gpu_memory_utilization=0.5, **OPTIONS) as llm:
        taken = before - free_bytes()
        assert kv_bytes(llm) < total / 2
        assert abs(taken - total / 2) < 0.05 * total
        everything = SamplingParams(max_tokens=2, top_p=0.9, repetition_penalty=1.1, logprobs=3)
        prompts = [[j % 40_000 for j in range(i, i + 64)] for i in range(64)]
        outputs = llm.generate(prompts, everything, use_tqdm=False)
        assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.spec("MEM-1")
def test_graphs_of_all_sizes_keep_what_the_largest_one_needs(checkpoint: Path) -> None:
    """Which is what the KV cache leaves to them; logits of each size would be 800 MB more."""
    sizes = graph_batch_sizes(512)
    options = OPTIONS | {"max_num_seqs": sizes[-1], "num_kvcache_blocks": 600}
    with LLM(checkpoint, enforce_eager=True, **options) as llm:
        runner = llm.model_runner
        assert isinstance(runner, CudaModelRunner)
        largest, every = (
            runner.meter.kept_by(lambda some=some: runner._capture(some))
            for some in (sizes[-1:], sizes)
        )
    assert largest <= every < largest + 64 * 2**20


@pytest.mark.spec("MEM-1")
def test_what_another_process_holds_is_left_alone(checkpoint: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    with another_process_holds(int(free - total * 0.3)):
        left = free_bytes()
        with LLM(checkpoint, gpu_memory_utilization=0.9, **OPTIONS) as llm:
            assert kv_bytes(llm) < left - SLACK_BYTES
            assert kv_bytes(llm) > left - 4 * 2**30
            assert len(answers(llm)) == len(PROMPTS)


@pytest.mark.spec("MEM-1", "MEM-3")
def test_two_engines_in_one_process_have_their_shares(checkpoint: Path) -> None:
    with LLM(checkpoint, gpu_memory_utilization=0.3, **OPTIONS) as first:
        alone = answers(first)
        with LLM(checkpoint, gpu_memory_utilization=0.3, **OPTIONS) as second:
            assert abs(kv_bytes(first) - kv_bytes(second)) < 0.02 * kv_bytes(first)
            assert answers(second) == alone
            first.reset_prefix_cache()
            assert answers(first) == alone


@pytest.mark.spec("MEM-3")
def test_closing_gives_the_memory_back_and_another_engine_starts(checkpoint: Path) -> None:
    with LLM(checkpoint, num_kvcache_blocks=64, **OPTIONS) as llm:
        answers(llm)  # what libraries keep for good is there now
    before = free_bytes()
    for _ in range(2):
        with LLM(checkpoint, gpu_memory_utilization=0.9, **OPTIONS) as llm:
            answers(llm)
            assert free_bytes() < 0.2 * before
        assert abs(free_bytes() - before) < 64 * 2**20


@pytest.mark.spec("MEM-2")
def test_a_share_that_holds_no_block_is_refused_with_the_figures(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0\.001 .*weights.* needs \d+"):
        LLM(checkpoint, gpu_memory_utilization=0.001, **OPTIONS)


@pytest.mark.spec("MEM-2")
def test_a_number_of_blocks_is_taken_as_given(checkpoint: Path) -> None:
    with LLM(checkpoint, num_kvcache_blocks=7, gpu_memory_utilization=0.001, **OPTIONS) as llm:
        assert llm.model_runner.num_blocks == 7
