"""Physical KV blocks: reference counts, the free list, and the prefix cache (BLK, PFX).

State of a block::

            allocate                 last holder lets go                    reused
    free ------------> used(ref>=1) ---------------------> free, published -------> used
                         | full and computed                   | prefix hit      (unpublished)
                         +------> published                    +------> used(ref=1), kept

Prefix caching follows vLLM's hash chain (automatic prefix caching): the hash of a full block
covers its tokens and its parent's hash. A hash only *finds* a candidate; whether it is a hit is
decided by comparing the whole token history, so that a collision costs time and never correctness
(PFX-2).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from nanovllm.engine.sequence import Sequence

HashFunction = Callable[[bytes, bytes], bytes]


def hash_block(tokens: bytes, parent_hash: bytes) -> bytes:
    """128-bit hash of a full block: its encoded tokens behind its parent's hash (PFX-1)."""
    return xxhash.xxh3_128_digest(parent_hash + tokens)


def encode_tokens(token_ids: list[int]) -> bytes:
    """Fixed-width little-endian encoding, the same on every platform (PFX-1)."""
    return np.array(token_ids, dtype="<i4").tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The token history that ends with one full block; its parent is the history before it."""

    hash: bytes
    tokens: bytes
    parent: Prefix | None
    salt: str | None

    def equals(self, tokens: bytes, parent: Prefix | None, salt: str | None) -> bool:
        """Whether this is the history `parent + tokens`; O(1) when the parents are one object."""
        mine: Prefix | None = self.parent
        if self.tokens != tokens or self.salt != salt:
            return False
        while mine is not parent:
            if mine is None or parent is None or mine.tokens != parent.tokens:
                return False
            mine, parent = mine.parent, parent.parent
        return True


class Block:
    """One physical block. `prefix` is its content's history while published, else None."""

    __slots__ = ("block_id", "prefix", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.prefix: Prefix | None = None


class BlockManager:
    """Owns every block; nobody else changes a reference count, the free list or the map.

    Args:
        num_blocks: blocks offered, `N`.
        block_size: token slots per block, `bs`.
        hash_function: `(encoded tokens, parent hash) -> hash`; tests inject colliding ones.

    Every operation costs O(1) per block it touches, whatever N (BLK-9).
    """

    def __init__(
        self, num_blocks: int, block_size: int, hash_function: HashFunction = hash_block
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be >= 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        # In order of reuse: unpublished blocks, then published ones, least recently released first.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Twins of one step may publish the same content twice, hence several ids (PFX-15). Those in
        # use come first, so that the first match is the best one; and a revived one was the first.
        self.hash_to_block_ids: dict[bytes, OrderedDict[int, None]] = {}
        self.num_published_blocks = 0
        self._hash = hash_function

    # ---- what is there -------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, seq: Sequence) -> list[int]:
        """Blocks that hold the leading full blocks of `seq`, up to the first miss (PFX-5).

        At least the last known token is left to compute (PFX-6), so a block that it completes is
        not asked for. Changes nothing.
        """
        hits: list[int] = []
        parent: Prefix | None = None
        if not seq.cacheable:
            return hits
        for i in range((seq.num_tokens - 1) // self.block_size):
            block = self._find(self._block_hash(seq, i), encode_tokens(seq.block(i)), parent, seq)
            if block is None:
                break
            hits.append(block.block_id)
            parent = block.prefix
        return hits

    def can_allocate(self, hits: list[int], num_tokens: int) -> bool:
        """Whether a table over `num_tokens` can be had now.

        A hit on a used block needs no free block, a hit on a free one consumes one (PFX-10).
        """
        revived = sum(self.blocks[block_id].ref_count == 0 for block_id in hits)
        missing = self.num_blocks_for(num_tokens) - len(hits)
        return revived + missing <= self.num_free_blocks

    def can_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the table of `seq` can grow to cover `num_tokens` positions."""
        return self.num_blocks_for(num_tokens) - len(seq.block_table) <= self.num_free_blocks

    # ---- what changes it -----------------------------------------------------------------

    def allocate(self, seq: Sequence, hits: list[int], num_tokens: int) -> None:
        """Give `seq` its first table: `hits` of `lookup`, then new blocks up to `num_tokens`."""
        assert not seq.block_table, f"{seq} already holds blocks"
        if not self.can_allocate(hits, num_tokens):
            raise ValueError(self._shortage(seq, num_tokens))
        for block_id in hits:
            self._acquire(self.blocks[block_id])
        seq.block_table.extend(hits)
        self.may_append(seq, num_tokens)

    def may_append(self, seq: Sequence, num_tokens: int) -> None:
        """Grow the table to cover `[0, num_tokens)`: all the blocks it takes, or none (BLK-3)."""
        if not self.can_append(seq, num_tokens):
            raise ValueError(self._shortage(seq, num_tokens))
        for _ in range(self.num_blocks_for(num_tokens) - len(seq.block_table)):
            seq.block_table.append(self._take_free_block())

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Make the blocks of `seq` that filled up while `[start, end)` was computed hittable.

        Call it once their KV is written, and in order: a block whose parent is not published
        stays out, since no lookup could reach it.
        """
        if not seq.cacheable:
            return
        for i in range(start // self.block_size, end // self.block_size):
            parent = self.blocks[seq.block_table[i - 1]].prefix if i else None
            block = self.blocks[seq.block_table[i]]
            if (i and parent is None) or block.prefix is not None:
                continue
            block_hash, tokens = self._block_hash(seq, i), encode_tokens(seq.block(i))
            twin = self._find(block_hash, tokens, parent, seq)
            # One object per content keeps `Prefix.equals` at O(1).
            shared = twin.prefix if twin else None
            block.prefix = shared or Prefix(block_hash, tokens, parent, seq.salt)
            twins = self.hash_to_block_ids.setdefault(block_hash, OrderedDict())
            twins[block.block_id] = None
            self.num_published_blocks += 1
            twins.move_to_end(block.block_id, last=False)

    def deallocate(self, seq: Sequence) -> None:
        """Let go of the whole table, from its tail, so that a descendant is reused before its
        ancestor (BLK-7, PFX-9)."""
        if not seq.block_table:
            raise ValueError(f"sequence {seq.seq_id} holds no blocks")
        for block_id in reversed(seq.block_table):
            self._release(self.blocks[block_id])
        del seq.block_table[:]

    def reset_prefix_cache(self) -> None:
        """Forget all published content. Tables stay as they are; their KV is still right."""
        for block_ids in self.hash_to_block_ids.values():
            for block_id in block_ids:
                self.blocks[block_id].prefix = None
        self.hash_to_block_ids.clear()
        self.num_published_blocks = 0

    # ---- single blocks -------------------------------------------------------------------

    def _acquire(self, block: Block) -> None:
        if block.ref_count == 0:
            del self.free_block_ids[block.block_id]
        block.ref_count += 1

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        self._unpublish(block)
        block.ref_count = 1
        return block_id

    def _release(self, block: Block) -> None:
        assert block.ref_count > 0, f"block {block.block_id} is free already"
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_block_ids[block.block_id] = None
            if block.prefix is None:
                self.free_block_ids.move_to_end(block.block_id, last=False)
            else:
                self.hash_to_block_ids[block.prefix.hash].move_to_end(block.block_id)

    def _unpublish(self, block: Block) -> None:
        if block.prefix is None:
            return
        twins = self.hash_to_block_ids[block.prefix.hash]
        del twins[block.block_id]
        if not twins:
            del self.hash_to_block_ids[block.prefix.hash]
        block.prefix = None
        self.num_published_blocks -= 1

    # ---- finding content -----------------------------------------------------------------

    def _block_hash(self, seq: Sequence, i: int) -> bytes:
        while len(seq.block_hashes) <= i:
            j = len(seq.block_hashes)
            parent_hash = seq.block_hashes[-1] if j else (seq.salt or "").encode()
            seq.block_hashes.append(self._hash(encode_tokens(seq.block(j)), parent_hash))
        return seq.block_hashes[i]

    def _find(
        self, block_hash: bytes, tokens: bytes, parent: Prefix | None, seq: Sequence
    ) -> Block | None:
        """A published block of exactly this history, one in use if there is: it costs nothing."""
        for block_id in self.hash_to_block_ids.get(block_hash, ()):
            block = self.blocks[block_id]
            assert block.prefix is not None
            if block.prefix.equals(tokens, parent, seq.salt):
                return block
        return None

    def _shortage(self, seq: Sequence, num_tokens: int) -> str:
        return (
            f"sequence {seq.seq_id} needs {self.num_blocks_for(num_tokens)} blocks for "
            f"{num_tokens} tokens; it holds {len(seq.block_table)} and "
            f"{self.num_free_blocks} of {self.num_blocks} are free"
        )
