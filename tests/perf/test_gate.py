"""What the regression gate times (`nanovllm gate times`): short, single-threaded, one idea each."""

import random

import torch
from host_step import BLOCK_SIZE, decoding_scheduler, host_step
from pytest_benchmark.fixture import BenchmarkFixture

from nanovllm import LLM, SamplingParams
from nanovllm.config import SchedulerConfig
from nanovllm.engine.scheduler import Scheduler
from nanovllm.layers.sampler import RowSampling, Sampler, SamplingInput


def test_host_step(benchmark: BenchmarkFixture) -> None:
    """Schedule, prepare and commit of a decode step of 256 sequences."""
    scheduler = decoding_scheduler(256, num_blocks=20_000)
    rows = benchmark.pedantic(host_step, (scheduler,), rounds=150, warmup_rounds=10)
    assert rows == 256


def test_admission_with_prefix_hits(benchmark: BenchmarkFixture) -> None:
    """64 prompts of 512 tokens that share half: hash, look up, allocate, publish, release."""
    rng = random.Random(0)
    shared = [rng.randrange(1000) for _ in range(256)]
    prompts = [shared + [rng.randrange(1000) for _ in range(256)] for _ in range(64)]
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=64 * 512,
            max_model_len=1024,
            num_kvcache_blocks=4_000,
            kvcache_block_size=BLOCK_SIZE,
            seed=0,
        )
    )

    def serve() -> int:
        for prompt in prompts:
            scheduler.add(prompt, SamplingParams(max_tokens=1))
        while not scheduler.is_finished():
            step = scheduler.schedule()
            scheduler.commit(step, {row.seq.seq_id: 1 for row in step.rows})
        return scheduler.block_manager.num_published_blocks

    published = benchmark.pedantic(serve, rounds=15, warmup_rounds=2)
    assert published >= 64 * 512 // BLOCK_SIZE // 2


def test_sampler(benchmark: BenchmarkFixture) -> None:
    """32 rows of a vocabulary of 32,000 with temperature, top-k and top-p."""
    logits = torch.randn(32, 32_000, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
    inputs = SamplingInput.from_rows([RowSampling(params, seed, 7) for seed in range(32)])
    output = benchmark.pedantic(Sampler(), (logits, inputs), rounds=12, warmup_rounds=2)
    assert not output.failed


def test_generate(benchmark: BenchmarkFixture) -> None:
    """16 requests of 32 tokens on the embedded model, end to end."""
    prompts = [f"And it came to pass in the days of number {i}" for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(enable_prefix_caching=False) as llm:
        outputs = benchmark.pedantic(
            llm.generate, (prompts, params, False), rounds=5, warmup_rounds=1
        )
    assert sum(len(output.token_ids) for output in outputs) == 16 * 32
