"""The KV cache in float8: what is kept of a value, and that the engine runs on it."""

from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.store_kvcache import store_kvcache_reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.spec("KV-1")
def test_values_are_rounded_to_three_bits_and_saturate() -> None:
    k_cache, v_cache = torch.zeros(2, 1, 4, 1, 3, dtype=torch.float8_e4m3fn)
    key = torch.tensor([[[1.0, -0.3, 1e6]]])
    store_kvcache_reference(key, -key, k_cache, v_cache, torch.tensor([2]))
    stored = k_cache[0, 2, 0].float()
    assert stored.tolist() == [1.0, -0.3125, 448.0]
    assert torch.equal(v_cache[0, 2, 0].float(), -stored)


@pytest.mark.spec("KV-4")
def test_it_holds_twice_the_tokens_and_gives_nearly_the_same_logits(checkpoint: Path) -> None:
    """Of a random model; how near, says `docs/performance.md` for the real shape."""
    prompts = [[i + 1, 5, 9, 2, 7, 7, i] for i in range(6)]
    options = {"kvcache_block_size": 4, "max_model_len": 64}
    with LLM(checkpoint, **options) as llm, LLM(checkpoint, kv_cache_dtype="fp8", **options) as fp8:
        assert fp8.model_runner.block_bytes * 4 == llm.model_runner.block_bytes
        exact, rounded = (
            [output.token_ids for output in engine.generate(prompts, GREEDY, use_tqdm=False)]
            for engine in (llm, fp8)
        )
    first = [a[0] == b[0] for a, b in zip(exact, rounded, strict=True)]
    assert sum(first) >= 5, (exact, rounded)
