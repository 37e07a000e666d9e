"""PFX: hits that are wrong, hits that are missed, and a map that says what is not so."""

from __future__ import annotations

import numpy as np
import xxhash

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.conformance.protocol import World
from nanovllm.engine.block_manager import (
    Block,
    BlockManager,
    HashFunction,
    Prefix,
    encode_tokens,
    hash_block,
)
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import FinishReason, Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.sampling_params import SamplingParams

# ---- what a block is called ----------------------------------------------------------------------


class OtherHash(ReferenceCore):
    """The reference with another block hash."""

    hash_block: HashFunction

    def reset(self, world: World) -> None:
        super().reset(world)
        if world.hash == "real":
            self.hash_function = self.scheduler.block_manager._hash = type(self).hash_block


@planted("PFX-1", instead_of=ReferenceCore)
class HashForgetsTheParent(OtherHash):
    """A block's hash covers its own tokens alone."""

    @staticmethod
    def hash_block(tokens: bytes, parent_hash: bytes) -> bytes:
        return hash_block(tokens, b"")


@planted("PFX-1", instead_of=ReferenceCore)
class HashOfJoinedDigits(OtherHash):
    """Tokens are hashed as decimal digits without a separator, so 1, 23 and 12, 3 are equal."""

    @staticmethod
    def hash_block(tokens: bytes, parent_hash: bytes) -> bytes:
        digits = "".join(map(str, np.frombuffer(tokens, dtype="<i4")))
        return xxhash.xxh3_128_digest(parent_hash + digits.encode())


@planted("PFX-2")
class TrustsTheHash(BlockManager):
    """Equal hashes are taken for equal content."""

    def _find(
        self, block_hash: bytes, tokens: bytes, parent: Prefix | None, seq: Sequence
    ) -> Block | None:
        found = next(iter(self.hash_to_block_ids.get(block_hash, ())), None)
        return None if found is None else self.blocks[found]


@planted("PFX-2")
class ComparesItsOwnTokensOnly(BlockManager):
    """A candidate's tokens are compared, and those of its ancestors are not."""

    def _find(
        self, block_hash: bytes, tokens: bytes, parent: Prefix | None, seq: Sequence
    ) -> Block | None:
        for block_id in self.hash_to_block_ids.get(block_hash, ()):
            prefix = self.blocks[block_id].prefix
            if prefix is not None and (prefix.tokens, prefix.salt) == (tokens, seq.salt):
                return self.blocks[block_id]
        return None


@planted("PFX-2")
class HitsOfAFailedAdmission(BlockManager):
    """What was found when a request could not be admitted is used later, when it can."""

    def __init__(self, num_blocks: int, block_size: int, hash_function: HashFunction) -> None:
        super().__init__(num_blocks, block_size, hash_function)
        self.found: dict[int, list[int]] = {}

    def lookup(self, seq: Sequence) -> list[int]:
        if seq.seq_id < 0:  # nobody's: a question at the blocks door
            return super().lookup(seq)
        return self.found.setdefault(seq.seq_id, super().lookup(seq))

    def allocate(self, seq: Sequence, hits: list[int], num_tokens: int) -> None:
        super().allocate(seq, hits, num_tokens)
        self.found.pop(seq.seq_id, None)


# ---- what is published ---------------------------------------------------------------------------


@planted("PFX-3")
class PartlyFilledBlocksArePublished(BlockManager):
    """The last block of a prompt is published before it is full."""

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        super().publish(seq, start, self.num_blocks_for(end) * self.block_size)


@planted("PFX-4")
class SampledTokenCountsAsComputed(Scheduler):
    """A block is published with the token that completes it, one step before that is computed."""

    def _append(self, seq: Sequence, token_id: int, stopped: bool) -> FinishReason | None:
        reason = super()._append(seq, token_id, stopped)
        self.block_manager.publish(seq, seq.num_tokens - 1, seq.num_tokens)
        return reason


@planted("PFX-4")
class FailedStepIsPublished(Scheduler):
    """The blocks of a step that raised are published as if it had been executed."""

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        for row in step.rows:
            self.block_manager.publish(row.seq, row.start, row.end)
        return super().fail_step(step, cause)


@planted("PFX-7")
class MapOnlyGrows(BlockManager):
    """Reusing a block clears the block and leaves its entry in the map."""

    def _unpublish(self, block: Block) -> None:
        block.prefix = None

    def _find(
        self, block_hash: bytes, tokens: bytes, parent: Prefix | None, seq: Sequence
    ) -> Block | None:
        for block_id in self.hash_to_block_ids.get(block_hash, ()):
            prefix = self.blocks[block_id].prefix
            if prefix is not None and prefix.equals(tokens, parent, seq.salt):
                return self.blocks[block_id]
        return None


@planted("PFX-7")
class ReusedBlockKeepsItsName(BlockManager):
    """A block that is reused stays published under what it held before."""

    def _unpublish(self, block: Block) -> None:
        pass


@planted("PFX-8")
class ReleaseForgetsTheContent(BlockManager):
    """A block is unpublished when its last holder lets go, not when it is reused."""

    def _release(self, block: Block) -> None:
        if block.ref_count == 1:
            self._unpublish(block)
        super()._release(block)


@planted("PFX-15")
class LostTwinHidesTheOther(BlockManager):
    """The map has one entry per content, and reusing one copy removes it for all."""

    def _unpublish(self, block: Block) -> None:
        if block.prefix is not None:
            for block_id in self.hash_to_block_ids.pop(block.prefix.hash):
                self.blocks[block_id].prefix = None


@planted("PFX-16")
class OnlyPromptsArePublished(BlockManager):
    """Blocks that generated tokens fill are never published."""

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        super().publish(seq, start, min(end, seq.num_prompt_tokens))


# ---- what is found -------------------------------------------------------------------------------


@planted("PFX-5")
class HitsBehindAMiss(BlockManager):
    """Every block whose tokens are cached counts as a hit, also behind one that is not."""

    def lookup(self, seq: Sequence) -> list[int]:
        cached = {b.prefix.tokens: b.block_id for b in self.blocks if b.prefix is not None}
        wanted = (encode_tokens(seq.block(i)) for i in range((len(seq) - 1) // self.block_size))
        return [cached[tokens] for tokens in wanted if tokens in cached]


@planted("PFX-10")
class CachedBlocksAreNotFree(BlockManager):
    """Free blocks that are published do not count when room is looked for."""

    @property
    def num_free_blocks(self) -> int:
        return sum(self.blocks[block_id].prefix is None for block_id in self.free_block_ids)


@planted("PFX-10")
class HitsOnFreeBlocksCostNothing(BlockManager):
    """Admission counts the blocks that are missing and forgets that hits use up free ones."""

    def can_allocate(self, hits: list[int], num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) - len(hits) <= self.num_free_blocks


@planted("PFX-11")
class WholePromptHitIsDropped(BlockManager):
    """When all of a prompt is cached it is computed afresh, to be sure to have a token."""

    def lookup(self, seq: Sequence) -> list[int]:
        hits = super().lookup(seq)
        whole = len(seq) % self.block_size == 0 and len(hits) + 1 == seq.num_blocks
        return [] if whole else hits


@planted("PFX-11")
class LastBlockIsNeverFound(BlockManager):
    """The token that is left to compute is taken from the last full block, also if one follows."""

    def lookup(self, seq: Sequence) -> list[int]:
        return super().lookup(seq)[: max(0, (len(seq) - 2) // self.block_size)]


@planted("PFX-13")
class ParametersInTheKey(Scheduler):
    """Requests share blocks only if they ask for the same number of tokens."""

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        return super().add(prompt_token_ids, params, salt=f"{salt}/{params.max_tokens}")


@planted("PFX-14")
class SaltIsDropped(Scheduler):
    """A request's salt never reaches its sequences."""

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        return super().add(prompt_token_ids, params)


@planted("PFX-17")
class ReadmissionCountsAgain(Scheduler):
    """A preempted request's hits are added to the statistics once more when it returns."""

    def _start(self, seq: Sequence, num_cached: int) -> None:
        if seq.num_cached_tokens is not None:
            self.stats.num_lookup_tokens += seq.num_tokens
            self.stats.num_cached_tokens += num_cached
        super()._start(seq, num_cached)


FAULTS = plantings_in(globals())
