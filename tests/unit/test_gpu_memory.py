"""The arithmetic of a GPU's memory, and the step and the graphs that it is measured with."""

from dataclasses import replace

import numpy as np
import pytest

from nanovllm.config import Config
from nanovllm.engine.decode_graphs import graph_batch_sizes
from nanovllm.engine.gpu_memory import SLACK_BYTES, GpuMemory
from nanovllm.engine.largest_step import largest_step

GIB = 2**30
ALONE = GpuMemory(total=100 * GIB, free=80 * GIB, weights=10 * GIB, peak=4 * GIB, graphs=1 * GIB)


@pytest.mark.spec("MEM-1")
def test_the_share_is_of_the_device_and_counts_what_is_ones_own() -> None:
    assert ALONE.kv_budget(0.5) == 35 * GIB


@pytest.mark.spec("MEM-1")
def test_what_others_hold_counts_against_what_is_free() -> None:
    crowded = replace(ALONE, free=20 * GIB)
    assert crowded.kv_budget(0.2) == 5 * GIB
    assert crowded.kv_budget(0.9) == 15 * GIB - SLACK_BYTES


@pytest.mark.spec("MEM-1")
@pytest.mark.parametrize(
    ("seqs", "tokens", "length"), [(8, 64, 100), (8, 64, 3), (64, 64, 9), (8, 63, 100)]
)
def test_the_largest_step_is_legal_and_writes_nothing(seqs: int, tokens: int, length: int) -> None:
    config = Config(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    inputs, rows = largest_step(config, length, block_size=4)
    counts = np.diff(inputs.cu_seqlens_q)
    assert len(rows) == len(counts) == len(inputs.last_tokens) == seqs
    assert counts.sum() == len(inputs.input_ids) == min(tokens, seqs * length)
    assert (inputs.positions[inputs.last_tokens] == counts - 1).all()
    assert inputs.context_lens.tolist() == counts.tolist()
    assert (inputs.slot_mapping == -1).all()
    assert not inputs.block_tables.any()
    assert inputs.positions.max() < length
    assert not rows[0].params.is_plain


@pytest.mark.spec("GRF-1")
@pytest.mark.parametrize("largest", [1, 3, 8, 17, 64, 100, 255, 256, 512])
def test_every_batch_size_has_a_graph_and_none_is_too_large(largest: int) -> None:
    sizes = graph_batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for batch in range(1, largest + 1):
        size = next(s for s in sizes if s >= batch)
        assert size - batch < min(16, max(8, batch))
