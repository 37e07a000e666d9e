"""Plans as arrays: what crosses to a worker."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from core_door import Door

from nanovllm.engine.model_input import ModelInput, prepare_model_input
from nanovllm.engine.step import ScheduledStep


def arrays(door: Door, step: ScheduledStep) -> ModelInput:
    return prepare_model_input(step, door.config.kvcache_block_size)


def decode_of(num_known: int) -> tuple[Door, ModelInput]:
    door = Door(num_kvcache_blocks=512, max_model_len=2048, max_num_batched_tokens=2048)
    door.add([1] * (num_known - 1))
    door.step()
    return door, arrays(door, door.schedule())


@pytest.mark.spec("SEQ-6")
@pytest.mark.parametrize("num_known", [2, 40, 300])
def test_a_decode_row_carries_one_token_however_long_the_sequence(num_known: int) -> None:
    _, wire = decode_of(num_known)
    assert wire.input_ids.shape == wire.positions.shape == wire.slot_mapping.shape == (1,)
    assert wire.positions.tolist() == [num_known - 1]
    assert wire.context_lens.tolist() == [num_known]
    assert wire.block_tables.shape == (1, -(-num_known // 4))


@pytest.mark.spec("SEQ-6")
def test_what_crosses_grows_with_the_table_only() -> None:
    sizes = [len(pickle.dumps(decode_of(num_known)[1])) for num_known in (41, 301)]
    assert sizes[1] - sizes[0] <= 4 * (301 - 41) // 4 + 64


@pytest.mark.spec("SEQ-6", "SCH-9")
def test_a_re_prefill_carries_every_token_that_it_computes() -> None:
    door = Door(num_kvcache_blocks=3, enable_prefix_caching=False)
    door.add([1] * 3, max_tokens=6)
    (seq,) = door.add([2] * 3, max_tokens=6)
    while not door.step().preempted:
        assert not seq.is_finished
    known = list(seq.token_ids)
    while seq.num_computed_tokens == 0:
        step = door.schedule()
        wire = arrays(door, step)
        door.commit(step)
    assert len(known) > 3
    assert wire.input_ids.tolist() == known
    assert wire.positions.tolist() == list(range(len(known)))


@pytest.mark.spec("KV-1", "KV-7", "KV-8")
def test_rows_of_a_mixed_plan() -> None:
    door = Door(policy="mixed", max_num_batched_tokens=9, alphabet=(7,))
    door.add([1, 2, 3, 4, 5])
    door.step()
    door.add([1, 2, 3, 4, 6, 7])
    door.add([8] * 7)
    step = door.schedule()
    wire = arrays(door, step)
    assert [(row.start, row.count) for row in step.rows] == [(5, 1), (4, 2), (0, 6)]
    assert wire.input_ids.tolist() == [7, 6, 7, 8, 8, 8, 8, 8, 8]
    assert wire.positions.tolist() == [5, 4, 5, 0, 1, 2, 3, 4, 5]
    assert wire.cu_seqlens_q.tolist() == [0, 1, 3, 9]
    assert wire.context_lens.tolist() == [6, 6, 6]
    assert wire.last_tokens.tolist() == [0, 2]  # the third row is a chunk: nothing is sampled
    for row, table in zip(step.rows, wire.block_tables.tolist(), strict=True):
        assert table == list(row.block_table)
    tables = [list(row.block_table) for row in step.rows]
    slots = [tables[0][1] * 4 + 1, tables[1][1] * 4, tables[1][1] * 4 + 1]
    slots += [tables[2][i // 4] * 4 + i % 4 for i in range(6)]
    assert wire.slot_mapping.tolist() == slots


@pytest.mark.spec("KV-1")
def test_short_tables_are_padded_with_minus_one() -> None:
    door = Door(num_kvcache_blocks=300, max_num_batched_tokens=1200, max_model_len=1200)
    door.add([1] * 1100)
    door.add([1])
    wire = arrays(door, door.schedule())
    assert wire.block_tables.shape == (2, 275)
    assert wire.block_tables[0].tolist() == list(range(275))
    assert wire.block_tables[1].tolist() == [275] + [-1] * 274


@pytest.mark.spec("KV-6", "SEQ-6")
def test_types_of_the_arrays() -> None:
    _, wire = decode_of(5)
    for name in ("input_ids", "positions", "slot_mapping", "last_tokens"):
        assert getattr(wire, name).dtype == np.int64
    for name in ("cu_seqlens_q", "context_lens", "block_tables"):
        assert getattr(wire, name).dtype == np.int32


@pytest.mark.spec("KV-1")
@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_slots_follow_the_table_for_any_block_size(block_size: int) -> None:
    door = Door(
        kvcache_block_size=block_size,
        num_kvcache_blocks=40,
        max_num_batched_tokens=7,
    )
    for length in (5, 9, 1):
        door.add([1] * length)
    while door.live:
        step = door.schedule()
        wire = arrays(door, step)
        expected = [
            row.block_table[i // block_size] * block_size + i % block_size
            for row in step.rows
            for i in range(row.start, row.end)
        ]
        assert wire.slot_mapping.tolist() == expected
        door.commit(step)
