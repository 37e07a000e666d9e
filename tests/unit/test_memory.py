"""Sizing the pool of KV blocks on a CPU."""

from pathlib import Path

import pytest

from nanovllm import LLM

SIZES = {"kvcache_block_size": 4, "max_model_len": 32, "max_num_seqs": 2}
BLOCK = 2 * 2 * 4 * 2 * 16 * 4  # K and V, layers, slots, KV heads, head_dim, bytes of a float32


@pytest.mark.spec("MEM-2")
def test_a_budget_below_one_block_is_refused_with_both_figures(checkpoint: Path) -> None:
    budget = BLOCK - 1
    with pytest.raises(ValueError, match=rf"is {budget} bytes; one KV block .* needs {BLOCK}$"):
        LLM(checkpoint, kvcache_memory_gb=budget / 2**30, **SIZES)


@pytest.mark.spec("MEM-2")
@pytest.mark.parametrize(("affordable", "blocks"), [(1, 1), (5, 5), (1000, 16)])
def test_a_budget_gives_the_blocks_it_holds_that_can_be_used(
    checkpoint: Path, affordable: int, blocks: int
) -> None:
    with LLM(checkpoint, kvcache_memory_gb=affordable * BLOCK / 2**30, **SIZES) as llm:
        assert llm.model_runner.num_blocks == blocks


@pytest.mark.spec("MEM-2")
@pytest.mark.parametrize("blocks", [1, 7, 100])
def test_a_number_of_blocks_is_taken_as_given(checkpoint: Path, blocks: int) -> None:
    tiny = BLOCK / 2**30
    with LLM(checkpoint, num_kvcache_blocks=blocks, kvcache_memory_gb=tiny, **SIZES) as llm:
        assert llm.model_runner.num_blocks == blocks
