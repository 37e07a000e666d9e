from collections import deque

from nanovllm.engine.sequence import Sequence


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1
        self.prefix: tuple[int, ...] = ()
        self.token_ids: list[int] = []


class BlockManager:
    """A block is a hit if all tokens before and in it are the same; the hash only finds it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids = deque(range(num_blocks))

    @classmethod
    def compute_hash(cls, token_ids: list[int], prefix: int = -1) -> int:
        return hash((prefix, tuple(token_ids)))

    def _hits(self, seq: Sequence) -> list[int]:
        hits: list[int] = []
        h = -1
        for i in range((len(seq) - 1) // self.block_size):
            h = self.compute_hash(seq.block(i), h)
            block = self.blocks[self.hash_to_block_id.get(h, -1)]
            prefix = tuple(seq.token_ids[: (i + 1) * self.block_size])
            if self.hash_to_block_id.get(h) is None or block.prefix != prefix:
                break
            hits.append(block.block_id)
        return hits

    def can_allocate(self, seq: Sequence) -> int:
        hits = self._hits(seq)
        used = sum(self.blocks[i].ref_count > 0 for i in hits)
        missing = seq.blocks_for(len(seq)) - used
        return len(hits) if missing <= len(self.free_block_ids) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        for block_id in self._hits(seq)[:num_cached_blocks]:
            if not self.blocks[block_id].ref_count:
                self.free_block_ids.remove(block_id)
            self.blocks[block_id].ref_count += 1
            seq.block_table.append(block_id)
        while len(seq.block_table) < seq.blocks_for(len(seq)):
            self._take(seq)
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def _take(self, seq: Sequence) -> None:
        block = self.blocks[self.free_block_ids.popleft()]
        if self.hash_to_block_id.get(block.hash) == block.block_id:
            del self.hash_to_block_id[block.hash]
        block.ref_count, block.hash, block.prefix, block.token_ids = 1, -1, (), []
        seq.block_table.append(block.block_id)

    def deallocate(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):
            self.blocks[block_id].ref_count -= 1
            if not self.blocks[block_id].ref_count:
                self.free_block_ids.append(block_id)
        seq.block_table = []
        seq.num_cached_tokens = 0

    def can_append(self, seq: Sequence) -> bool:
        return len(self.free_block_ids) >= seq.blocks_for(len(seq)) - len(seq.block_table)

    def may_append(self, seq: Sequence) -> None:
        while len(seq.block_table) < seq.blocks_for(len(seq)):
            self._take(seq)

    def hash_blocks(self, seq: Sequence) -> None:
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        h = -1
        for i in range(end // self.block_size):
            h = self.compute_hash(seq.block(i), h)
            block = self.blocks[seq.block_table[i]]
            # The first to come stays: its twin finds nothing to publish.
            if i >= seq.num_cached_tokens // self.block_size and h not in self.hash_to_block_id:
                block.hash, block.token_ids = h, seq.block(i)
                block.prefix = tuple(seq.token_ids[: (i + 1) * self.block_size])
                self.hash_to_block_id[h] = block.block_id
