"""BLK: blocks that are lost, doubled, taken too early or too late."""

from __future__ import annotations

from array import array

from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepBuilder
from nanovllm.sampling_params import SamplingParams


@planted("BLK-1")
class RevivedBlockStaysFree(BlockManager):
    """A hit on a free block is used without being struck off the free list."""

    def _acquire(self, block: Block) -> None:
        block.ref_count += 1


@planted("BLK-1")
class PartlyFilledBlockIsLost(BlockManager):
    """Only published blocks go back to the free list, so each request leaks its last one."""

    def _release(self, block: Block) -> None:
        super()._release(block)
        if block.ref_count == 0 and block.prefix is None:
            del self.free_block_ids[block.block_id]


@planted("BLK-2")
class SecondHolderIsNotCounted(BlockManager):
    """A hit on a block in use joins the table without raising the reference count."""

    def _acquire(self, block: Block) -> None:
        if block.ref_count == 0:
            super()._acquire(block)


@planted("BLK-3")
class RefusalKeepsItsHits(BlockManager):
    """Hits are taken before it is known whether the rest fits, and kept if it does not."""

    def can_allocate(self, hits: list[int], num_tokens: int) -> bool:
        fits = super().can_allocate(hits, num_tokens)
        if not fits:
            for block_id in hits:
                self._acquire(self.blocks[block_id])
        return fits


@planted("BLK-4")
class BlocksAreRoundedDown(BlockManager):
    """The blocks of n tokens are counted as n // block_size."""

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_tokens // self.block_size


@planted("BLK-4")
class OneBlockInReserve(BlockManager):
    """Each table is kept one block ahead, also where its request will never fill it."""

    def may_append(self, seq: Sequence, num_tokens: int) -> None:
        super().may_append(seq, num_tokens)
        if self.num_free_blocks and len(seq.block_table) == self.num_blocks_for(num_tokens):
            seq.block_table.append(self._take_free_block())


@planted("BLK-5")
class BlockIsTakenOneTokenEarly(Scheduler):
    """The sampled token counts as stored already when capacity is checked, a wrong fix in
    circulation."""

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepBuilder) -> bool:
        return super()._make_room(seq, num_tokens + 1, plan)


@planted("BLK-5")
class BlockIsTakenOneTokenLate(Scheduler):
    """A token that begins a block is computed before the block is taken."""

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepBuilder) -> bool:
        return super()._make_room(seq, num_tokens - 1, plan)


@planted("BLK-6")
class RoomForTheLastToken(Scheduler):
    """A request must have a slot for each of its tokens, also for the last, which nobody reads."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        max_tokens = super().validate(num_prompt_tokens, params)
        num_slots = self.config.num_kvcache_blocks * self.config.kvcache_block_size
        if num_prompt_tokens + max_tokens > num_slots:
            raise ValueError(f"{num_prompt_tokens} + {max_tokens} tokens, {num_slots} slots")
        return max_tokens


@planted("BLK-7", door="unit")
class ReleasesFromTheHead(BlockManager):
    """A table is released from its first block, so the head of a chain is reused first."""

    def deallocate(self, seq: Sequence) -> None:
        seq.block_table = array("i", reversed(seq.block_table))
        super().deallocate(seq)


@planted("BLK-7", door="unit")
class ReleasesNothingInSilence(BlockManager):
    """Releasing a table that is empty, twice the same one say, passes unnoticed."""

    def deallocate(self, seq: Sequence) -> None:
        if seq.block_table:
            super().deallocate(seq)


@planted("BLK-8")
class FirstReleaseFrees(BlockManager):
    """The first holder that lets go frees a block, though others still read it."""

    def _release(self, block: Block) -> None:
        block.ref_count = 1
        super()._release(block)


@planted("BLK-8")
class SamplesShareThePartialBlock(Scheduler):
    """A sample takes over the last, partly filled block of its prompt and writes into it."""

    def _start(self, seq: Sequence, num_cached: int) -> None:
        super()._start(seq, num_cached)
        last = (seq.num_prompt_tokens - 1) // self.config.kvcache_block_size
        twins = [s for s in self.running if s is not seq and s.token_ids[:-1] == seq.token_ids]
        if twins and last < len(seq.block_table) and last < len(twins[0].block_table):
            blocks = self.block_manager
            blocks._release(blocks.blocks[seq.block_table[last]])
            seq.block_table[last] = twins[0].block_table[last]
            blocks._acquire(blocks.blocks[seq.block_table[last]])


@planted("BLK-9", door="unit")
class SearchesForAFreeBlock(BlockManager):
    """A free block is found by looking at one after the other."""

    def _take_free_block(self) -> int:
        block = next(block for block in self.blocks if block.block_id in self.free_block_ids)
        self.free_block_ids.move_to_end(block.block_id, last=False)
        return super()._take_free_block()


FAULTS = plantings_in(globals())
