"""Physical blocks: conservation, growth, release, cost."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

import pytest
from core_door import Door

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def sequence(tokens: list[int], block_size: int = 4, seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, tokens, SamplingParams(), block_size=block_size, max_tokens=64)


def computed(manager: BlockManager, tokens: list[int]) -> Sequence:
    """A sequence whose tokens are all computed and published."""
    seq = sequence(tokens, manager.block_size)
    manager.allocate(seq, manager.lookup(seq), len(tokens))
    manager.publish(seq, 0, len(tokens))
    return seq


def state(manager: BlockManager) -> tuple[Any, ...]:
    return (
        list(manager.free_block_ids),
        [(block.ref_count, block.prefix) for block in manager.blocks],
        {block_hash: list(ids) for block_hash, ids in manager.hash_to_block_ids.items()},
    )


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, -1)])
def test_a_pool_without_blocks_or_slots_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_blocks} and {block_size}"):
        BlockManager(num_blocks, block_size)


@pytest.mark.spec("BLK-1", "BLK-2")
def test_each_block_is_free_or_used_and_counts_its_holders() -> None:
    manager = BlockManager(6, 4)
    assert manager.num_free_blocks == 6
    first = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = computed(manager, [1, 2, 3, 4, 9])
    assert list(first.block_table) == [0, 1, 2]
    assert list(second.block_table) == [0, 3]
    assert [block.ref_count for block in manager.blocks] == [2, 1, 1, 1, 0, 0]
    assert sorted(manager.free_block_ids) == [4, 5]
    manager.deallocate(first)
    assert [block.ref_count for block in manager.blocks] == [1, 0, 0, 1, 0, 0]
    assert sorted(manager.free_block_ids) == [1, 2, 4, 5]
    manager.deallocate(second)
    assert manager.num_free_blocks == 6


@pytest.mark.spec("BLK-3")
def test_a_refused_allocation_changes_nothing() -> None:
    manager = BlockManager(4, 4)
    manager.deallocate(computed(manager, [1, 2, 3, 4, 5, 6, 7, 8]))
    holder = sequence([9] * 4)
    manager.allocate(holder, [], 4)
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8] + [0] * 9, seq_id=3)
    hits = manager.lookup(seq)
    assert len(hits) == 2
    before = state(manager)
    message = "sequence 3 needs 5 blocks for 17 tokens; it holds 0 and 3 of 4 are free"
    with pytest.raises(ValueError, match=message):
        manager.allocate(seq, hits, 17)
    assert state(manager) == before
    assert not seq.block_table


@pytest.mark.spec("BLK-3")
def test_a_refused_growth_takes_no_block_at_all() -> None:
    manager = BlockManager(3, 4)
    seq = sequence([1] * 4, seq_id=5)
    manager.allocate(seq, [], 4)
    before = state(manager)
    assert not manager.can_append(seq, 13)
    with pytest.raises(ValueError, match="sequence 5 needs 4 blocks for 13 tokens; it holds 1"):
        manager.may_append(seq, 13)
    assert state(manager) == before
    assert len(seq.block_table) == 1
    assert manager.can_append(seq, 12)
    manager.may_append(seq, 12)
    assert len(seq.block_table) == 3


@pytest.mark.spec("BLK-4")
def test_a_table_covers_the_positions_asked_for_exactly() -> None:
    for num_tokens in range(1, 17):
        manager = BlockManager(4, 4)
        seq = sequence([1] * 16)
        manager.allocate(seq, [], num_tokens)
        assert len(seq.block_table) == -(-num_tokens // 4)


def blocks_held(p: int, block_size: int, num_outputs: int) -> list[int]:
    """Blocks in the row whose commit yields output 1, 2, ..."""
    door = Door(kvcache_block_size=block_size, num_kvcache_blocks=16)
    door.add([1] * p, max_tokens=num_outputs)
    return [len(step.rows[0].block_table) for step in door.drain()]


@pytest.mark.spec("BLK-5", "BLK-6")
@pytest.mark.parametrize(
    ("p", "held"), [(3, [1, 1, 2, 2]), (4, [1, 2, 2, 2]), (5, [2, 2, 2, 2]), (8, [2, 3, 3, 3])]
)
def test_a_new_block_exactly_at_multiples_of_the_block_size(p: int, held: list[int]) -> None:
    assert blocks_held(p, 4, 4) == held


@pytest.mark.spec("BLK-5", "BLK-6")
def test_blocks_of_one_token() -> None:
    assert blocks_held(3, 1, 4) == [3, 4, 5, 6]


@pytest.mark.spec("BLK-6")
@pytest.mark.parametrize(("p", "k"), [(1, 4), (4, 1), (4, 5), (5, 4), (7, 2), (6, 4)])
def test_the_last_token_is_never_stored(p: int, k: int) -> None:
    needed = -(-(p + k - 1) // 4)
    door = Door(num_kvcache_blocks=needed)
    (seq,) = door.run([1] * p, max_tokens=k)
    assert seq.num_completion_tokens == k
    assert door.scheduler.stats.num_preemptions == 0


@pytest.mark.spec("BLK-7")
def test_release_walks_from_the_tail_and_frees_with_the_last_holder() -> None:
    manager = BlockManager(3, 4)
    first = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    second = computed(manager, [1, 2, 3, 4, 5])
    manager.deallocate(first)
    assert list(manager.free_block_ids) == [1]
    manager.deallocate(second)
    # The short last block of `second` is unpublished, so it is reused before all others.
    assert list(manager.free_block_ids) == [2, 1, 0]


@pytest.mark.spec("BLK-7", "PFX-9")
def test_a_descendant_is_reused_before_its_ancestor() -> None:
    manager = BlockManager(3, 4)
    manager.deallocate(computed(manager, list(range(12))))
    assert list(manager.free_block_ids) == [2, 1, 0]


@pytest.mark.spec("BLK-7")
def test_releasing_an_empty_table_raises() -> None:
    manager = BlockManager(2, 4)
    seq = sequence([1, 2], seq_id=9)
    for _ in range(2):
        with pytest.raises(ValueError, match="sequence 9 holds no blocks"):
            manager.deallocate(seq)
        manager.allocate(seq, [], 2)
        manager.deallocate(seq)
    assert manager.num_free_blocks == 2


@pytest.mark.spec("BLK-8", "FRK-2")
def test_a_partly_filled_block_is_never_shared() -> None:
    door = Door()
    leader, follower = door.add([1, 2, 3, 4, 5, 6], n=2, max_tokens=3)
    door.step()
    door.step()
    assert leader.block_table[0] == follower.block_table[0]
    assert leader.block_table[1] != follower.block_table[1]


class CountingBlocks(list[Any]):
    """Counts how often a block is looked at."""

    touched = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.touched += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.touched += len(self)
        return super().__iter__()


class CountingFreeList(OrderedDict[int, None]):
    """Counts operations, and every element that an iteration would visit."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__((block_id, None) for block_id in block_ids)

    def __iter__(self) -> Iterator[int]:
        self.calls["visited"] += len(self)
        return super().__iter__()

    def popitem(self, last: bool = True) -> tuple[int, None]:
        self.calls["taken"] += 1
        return super().popitem(last)


def cost(num_blocks: int) -> tuple[int, dict[str, int]]:
    """Blocks touched by allocate, publish, append, release and revive of one sequence."""
    manager = BlockManager(num_blocks, 4)
    manager.blocks = blocks = CountingBlocks(manager.blocks)
    manager.free_block_ids = free = CountingFreeList(manager.free_block_ids)
    blocks.touched = 0
    seq = computed(manager, list(range(40)))
    manager.may_append(seq, 41)
    manager.deallocate(seq)
    again = sequence(list(range(40)))
    manager.allocate(again, manager.lookup(again), 40)
    manager.deallocate(again)
    return blocks.touched, dict(free.calls)


@pytest.mark.spec("BLK-9")
def test_cost_does_not_depend_on_the_size_of_the_pool() -> None:
    touched, calls = cost(100)
    assert calls == {"taken": 12}
    assert touched <= 10 * 12
    assert cost(100_000) == (touched, calls)


def lookup_cost(num_twins: int, num_used: int) -> int:
    """Blocks touched when content that exists `num_twins` times is looked for and taken."""
    manager = BlockManager(1000, 4)
    twins = [sequence(list(range(40)), seq_id=i) for i in range(num_twins)]
    for twin in twins:
        manager.allocate(twin, [], 40)
    for twin in twins:
        manager.publish(twin, 0, 40)
    for twin in twins[: num_twins - num_used]:
        manager.deallocate(twin)
    manager.blocks = blocks = CountingBlocks(manager.blocks)
    seq = sequence(list(range(41)))
    hits = manager.lookup(seq)
    manager.allocate(seq, hits, 41)
    assert [manager.blocks[block_id].ref_count for block_id in hits] == [1 + bool(num_used)] * 10
    return blocks.touched


@pytest.mark.spec("BLK-9", "PFX-15")
@pytest.mark.parametrize("num_used", [0, 1])
def test_cost_of_a_hit_does_not_depend_on_the_number_of_twins(num_used: int) -> None:
    assert lookup_cost(64, num_used) == lookup_cost(2, num_used)


@pytest.mark.spec("PFX-10", "PFX-15")
@pytest.mark.parametrize("survivor", [0, 1, 2])
def test_of_twins_the_one_in_use_is_hit(survivor: int) -> None:
    manager = BlockManager(4, 4)
    twins = [sequence([1, 2, 3, 4], seq_id=i) for i in range(3)]
    for twin in twins:
        manager.allocate(twin, [], 4)
    for i, twin in enumerate(twins):
        manager.publish(twin, 0, 4)
        if i != survivor:
            manager.deallocate(twin)
    for _ in range(2):
        seq = sequence([1, 2, 3, 4, 5], seq_id=9)
        hits = manager.lookup(seq)
        assert hits == list(twins[survivor].block_table)
        manager.allocate(seq, hits, 5)
        manager.deallocate(seq)
    manager.deallocate(twins[survivor])
    revived = sequence([1, 2, 3, 4, 5], seq_id=9)
    manager.allocate(revived, manager.lookup(revived), 4)
    assert manager.lookup(sequence([1, 2, 3, 4, 6])) == list(revived.block_table)
