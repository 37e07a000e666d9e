"""Kernels launched, and waits for the device, of one decode step: counted exactly (PRF-3)."""

from collections.abc import Iterator

import pytest
import torch
from tiny_models import make_checkpoint
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams

LAYERS = 3
STEPS = 10
BATCH = 40  # a graph of its own

PER_LAYER = (
    "_qk_norm_rope_store_kernel",
    "_paged_decode_kernel",
    "_silu_and_mul_kernel",
)
PER_STEP = (
    "_decode_inputs_kernel",
    "_rms_norm_kernel",
    "_sample_chunk_kernel",
    "_best_chunk_kernel",
    "_keep_tokens_kernel",
    "_post_tokens_kernel",
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    checkpoint = make_checkpoint(
        tmp_path_factory.mktemp("model"),
        vocab_size=10_000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        head_dim=64,
        dtype=torch.bfloat16,
    )
    with LLM(checkpoint, skip_tokenizer=True, num_kvcache_blocks=1000, max_num_seqs=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def counts(llm: LLM) -> dict[str, float]:
    """Events a step, by name, of steady decode."""
    params = SamplingParams(max_tokens=16 + STEPS, ignore_eos=True)
    for i in range(BATCH):
        llm.add_request([i + 1, 2, 3], params)
    for _ in range(4):
        llm.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            assert llm.step().num_decode_tokens == BATCH
    while not llm.is_finished():
        llm.step()
    return {event.key: event.count / STEPS for event in profiler.key_averages()}


@pytest.mark.spec("PRF-3")
def test_each_kernel_runs_once_where_it_belongs(counts: dict[str, float]) -> None:
    def launched(name: str) -> float:
        return sum(count for key, count in counts.items() if key.startswith(name))

    assert {name: launched(name) for name in PER_LAYER} == dict.fromkeys(PER_LAYER, LAYERS)
    assert {name: launched(name) for name in PER_STEP} == dict.fromkeys(PER_STEP, 1)
    assert launched("_add_rms_norm_kernel") == 2 * LAYERS


@pytest.mark.spec("PRF-3")
def test_a_step_is_one_graph_and_the_host_waits_once(counts: dict[str, float]) -> None:
    """It waits for an event behind the graph, never for the stream or the device, and copies
    nothing: each side reads what the other one wrote.
    """
    assert counts.get("cudaGraphLaunch") == 1
    assert counts.get("cudaStreamSynchronize", 0) == 0
    assert counts.get("cudaDeviceSynchronize", 0) <= 1 / STEPS  # the profiler's own
    waits = counts.get("cudaEventSynchronize", 0)
    assert 1 <= waits <= 2  # for the tokens, and for the mail slot's step before
    assert counts.get("cudaMemcpyAsync", 0) == 0
