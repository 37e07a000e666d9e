"""Continuous batching against HF `generate` in static batches, on the same model and requests.

One thread each, in CPU seconds of the process: other processes on the machine hardly touch them.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from time import process_time

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tiny_models import make_checkpoint
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

VOCAB_SIZE = 4096
NUM_REQUESTS = 32
HF_BATCH_SIZE = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )


def workload() -> tuple[list[list[int]], list[int]]:
    """Prompts of 16-256 tokens and output lengths of 8-128."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(16, 256))]
        for _ in range(NUM_REQUESTS)
    ]
    return prompts, [rng.randint(8, 128) for _ in range(NUM_REQUESTS)]


def static_batches(prompts: list[list[int]], lengths: list[int]) -> Iterator[dict]:
    """Left-padded batches in order of arrival; each runs as long as its longest request."""
    for i in range(0, len(prompts), HF_BATCH_SIZE):
        batch = prompts[i : i + HF_BATCH_SIZE]
        width, steps = max(map(len, batch)), max(lengths[i : i + HF_BATCH_SIZE])
        yield {
            "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in batch]),
            "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch]),
            "max_new_tokens": steps,
            "min_new_tokens": steps,
        }


@pytest.mark.spec("SCH-16")
def test_twice_the_useful_tokens_per_second(checkpoint: Path, benchmark: BenchmarkFixture) -> None:
    prompts, lengths = workload()
    params = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True) for k in lengths]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with LLM(checkpoint, skip_tokenizer=True) as llm, torch.inference_mode():
        llm.generate(prompts[:2], params[0], use_tqdm=False)
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
        llm.reset_prefix_cache()
        begin = process_time()
        outputs = benchmark.pedantic(llm.generate, (prompts, params, False), rounds=1)
        seconds = process_time() - begin
        begin = process_time()
        for batch in static_batches(prompts, lengths):
            model.generate(**batch, do_sample=False, pad_token_id=0)
        hf_seconds = process_time() - begin
    assert [len(output.token_ids) for output in outputs] == lengths
    benchmark.extra_info |= {
        "useful_tokens": sum(lengths),
        "tokens_per_second": round(sum(lengths) / seconds, 1),
        "hf_tokens_per_second": round(sum(lengths) / hf_seconds, 1),
        "ratio": round(hf_seconds / seconds, 2),
    }
    print(f"\n{benchmark.extra_info}")
    assert hf_seconds >= 2 * seconds, f"{seconds:.1f} s against {hf_seconds:.1f} s of HF's"
