"""Cases from public reports that show at the core door; `Door` also checks each run's output."""

from __future__ import annotations

import random

import pytest
from core_door import Door
from core_world import constant_hash, one_bit_hash

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import HashFunction, hash_block
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.sampling_params import SamplingParams


def run(
    door: Door, prompt: range | list[int], max_tokens: int = 1
) -> tuple[Sequence, ScheduledStep]:
    """The sequence, and its first step."""
    (seq,) = door.add(list(prompt), max_tokens=max_tokens)
    first = door.step()
    door.drain()
    return seq, first


@pytest.mark.spec("BLK-1", "PFX-7")
def test_b03_accounting_sums_to_the_pool() -> None:
    door = Door(num_kvcache_blocks=8)
    run(door, range(1, 9))
    run(door, [1, 2, 3, 4, 9, 10, 11, 12])
    pool = door.blocks
    cached = [block for block in pool.blocks if block.prefix is not None]
    assert len(cached) == pool.num_published_blocks == 3
    assert sum(block.ref_count > 0 for block in pool.blocks) == 0
    assert pool.num_blocks - len(cached) == 5
    assert pool.num_free_blocks == 8


@pytest.mark.spec("BLK-5")
@pytest.mark.parametrize(("p", "held"), [(3, [1, 1, 2]), (4, [1, 2, 2]), (5, [2, 2, 2])])
def test_b06_blocks_at_the_boundary(p: int, held: list[int]) -> None:
    door = Door()
    door.add([1] * p, max_tokens=4)
    assert [len(step.rows[0].block_table) for step in door.drain()][:3] == held


@pytest.mark.spec("BLK-5")
@pytest.mark.parametrize("p", [4, 8])
def test_b06_prompts_of_whole_blocks_run(p: int) -> None:
    (seq,) = Door().run([1] * p, max_tokens=4)
    assert seq.num_completion_tokens == 4


@pytest.mark.spec("PFX-6", "PFX-11")
def test_b12_whole_prompt_in_the_cache() -> None:
    door = Door()
    first, _ = run(door, range(1, 9))
    second, step = run(door, range(1, 9))
    assert second.num_cached_tokens == 4
    assert [(row.start, row.count) for row in step.rows] == [(4, 4)]
    assert second.completion_token_ids == first.completion_token_ids
    third, _ = run(door, range(1, 13))
    assert third.num_cached_tokens == 8


@pytest.mark.spec("PFX-16", "SCH-9")
def test_b13_work_is_counted_after_the_lookup() -> None:
    door = Door(num_kvcache_blocks=5)
    door.add([50] * 8, max_tokens=2)
    (seq,) = door.add(range(1, 10), max_tokens=3)
    door.step()
    assert door.step().preempted == (seq,)
    assert (seq.num_tokens, seq.num_completion_tokens) == (10, 1)
    (row,) = door.step().rows
    assert (row.start, row.count, row.end) == (8, 2, 10)


@pytest.mark.spec("PFX-2", "PFX-7")
def test_b14_a_reused_block_leaves_no_stale_entry() -> None:
    door = Door(num_kvcache_blocks=2)
    run(door, range(1, 9))
    run(door, range(11, 19))
    assert len(door.blocks.hash_to_block_ids) == 2
    again, _ = run(door, range(1, 9))
    assert again.num_cached_tokens == 0


@pytest.mark.spec("PFX-7")
def test_b14_the_map_does_not_grow_with_the_number_of_prompts() -> None:
    scheduler = Scheduler(SchedulerConfig(1, 8, 16, num_kvcache_blocks=2, kvcache_block_size=4))
    draw = random.Random(0)
    for _ in range(10_000):
        (seq,) = scheduler.add([draw.randrange(9) for _ in range(8)], SamplingParams(max_tokens=1))
        scheduler.commit(scheduler.schedule(), {seq.seq_id: 0})
        assert len(scheduler.block_manager.hash_to_block_ids) <= 2
    assert scheduler.is_finished()


@pytest.mark.spec("PFX-4", "PFX-11")
def test_b16_hits_are_looked_up_again_at_each_attempt() -> None:
    door = Door(num_kvcache_blocks=4, max_num_batched_tokens=16)
    run(door, range(1, 5))
    (r,) = door.add(range(21, 29), max_tokens=6)
    door.step()
    (w,) = door.add(range(1, 17), max_tokens=1)
    while not r.is_finished:
        assert [row.seq for row in door.step().rows] == [r]
    (row,) = door.step().rows
    assert (row.seq, row.start, row.count) == (w, 0, 16)
    assert w.num_cached_tokens == 0


@pytest.mark.spec("PFX-2")
@pytest.mark.parametrize("hash_function", [constant_hash, one_bit_hash])
def test_b17_collisions_share_nothing(hash_function: HashFunction) -> None:
    door = Door(hash_function=hash_function, num_kvcache_blocks=24)
    draw = random.Random(17)
    shared = 0
    for _ in range(20):
        start = [draw.choice((1, 2))] * 4
        door.add(start + [draw.choice((1, 2)) for _ in range(draw.randint(1, 8))], max_tokens=6)
        door.step()
        held = [(entry, b, i) for entry in door.book.seated for i, b in enumerate(entry.table)]
        for entry, block, i in held:
            for other, other_block, j in held:
                if other is not entry and block == other_block:
                    shared += 1
                    assert i == j
                    assert entry.tokens[: 4 * (i + 1)] == other.tokens[: 4 * (i + 1)]
    door.drain()
    assert shared > 0


@pytest.mark.spec("PFX-2")
@pytest.mark.parametrize("hash_function", [hash_block, constant_hash])
def test_b18_equal_block_behind_different_ancestors(hash_function: HashFunction) -> None:
    door = Door(hash_function=hash_function)
    _, first = run(door, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    seq, second = run(door, [9, 9, 9, 9, 5, 6, 7, 8, 0])
    assert seq.num_cached_tokens == 0
    assert door.blocks.num_published_blocks == 4
    assert set(first.rows[0].block_table[:2]).isdisjoint(second.rows[0].block_table)


@pytest.mark.spec("PFX-9")
def test_b21_the_deepest_block_is_reused_first() -> None:
    door = Door(num_kvcache_blocks=3)
    run(door, range(1, 13))
    run(door, range(21, 25))
    again, _ = run(door, range(1, 13))
    assert again.num_cached_tokens == 8


@pytest.mark.spec("PFX-9")
def test_b21_blocks_of_the_older_request_go_first() -> None:
    door = Door(num_kvcache_blocks=4)
    run(door, range(1, 9))
    run(door, range(11, 19))
    run(door, range(21, 29))
    newer, _ = run(door, range(11, 19))
    assert newer.num_cached_tokens == 4


@pytest.mark.spec("PFX-10")
def test_b27_cached_blocks_do_not_block_admission() -> None:
    door = Door(num_kvcache_blocks=8)
    for start in (10, 20, 30, 40):
        run(door, range(start, start + 8))
    assert door.blocks.num_published_blocks == 8
    assert door.blocks.num_free_blocks == 8
    (seq,) = door.add(range(50, 58), max_tokens=2)
    step = door.schedule()
    assert [row.seq for row in step.rows] == [seq]
    assert door.blocks.num_free_blocks == 6
    door.commit(step)
    door.drain()


@pytest.mark.spec("SCH-7a")
def test_b31_a_prompt_that_fits_the_model_but_not_the_pool_is_refused() -> None:
    door = Door(num_kvcache_blocks=4, max_model_len=64)
    with pytest.raises(ValueError, match="20 tokens; the KV cache holds 16"):
        door.add([1] * 20)
    seq, _ = run(door, [1, 2, 3], max_tokens=2)
    assert (seq.num_completion_tokens, seq.finish_reason) == (2, "length")


@pytest.mark.spec("SCH-7d")
def test_b31_outputs_beyond_the_pool_are_refused() -> None:
    door = Door(num_kvcache_blocks=4, max_model_len=64)
    with pytest.raises(ValueError, match="14 prompt tokens and max_tokens=10 need 23 slots"):
        door.add([1] * 14, max_tokens=10)
    seq, _ = run(door, [1] * 14, max_tokens=3)
    assert seq.num_completion_tokens == 3
    assert door.book.num_preemptions == 0


@pytest.mark.spec("SCH-9", "PFX-17")
def test_b37_a_preempted_request_counts_its_outputs_once() -> None:
    door = Door(num_kvcache_blocks=5, alphabet=range(40))
    door.add([50] * 8, max_tokens=6)
    (seq,) = door.add([1, 2, 3, 4, 5], max_tokens=6)
    while not (step := door.step()).preempted:
        assert not seq.is_finished
    assert step.preempted == (seq,)
    door.drain()
    assert (seq.num_prompt_tokens, seq.num_completion_tokens) == (5, 6)
    assert seq.finish_reason == "length"


@pytest.mark.spec("SCH-7a", "SCH-7d")
def test_b43_total_length_at_max_model_len() -> None:
    door = Door(max_model_len=16)
    seq, _ = run(door, [1] * 10, max_tokens=100)
    assert (seq.num_completion_tokens, seq.finish_reason) == (6, "length")
    seq, _ = run(door, [1] * 15, max_tokens=100)
    assert (seq.num_completion_tokens, seq.finish_reason) == (1, "length")
    for p in (16, 17):
        with pytest.raises(ValueError, match=f"{p} tokens; max_model_len is 16"):
            door.add([1] * p)
