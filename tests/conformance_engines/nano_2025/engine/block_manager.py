from collections import deque


def compute_hash(token_ids, prefix=-1):
    return hash((prefix, tuple(token_ids)))


class Block:
    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_count = 0
        self.token_ids = []


class BlockManager:
    """Publishes in `allocate`, and compares a block's own tokens alone."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.hash_to_block_id = {}
        self.free_block_ids = deque(range(num_blocks))

    def can_allocate(self, seq):
        return len(self.free_block_ids) >= seq.num_blocks

    def allocate(self, seq):
        h, hit = -1, True
        for i in range(seq.num_blocks):
            tokens = seq.block(i)
            full = len(tokens) == self.block_size
            h = compute_hash(tokens, h) if full else -1
            block_id = self.hash_to_block_id.get(h)
            hit = hit and block_id is not None and self.blocks[block_id].token_ids == tokens
            if hit:
                seq.num_cached_tokens += self.block_size
                if not self.blocks[block_id].ref_count:
                    self.free_block_ids.remove(block_id)
            else:
                block_id = self.free_block_ids.popleft()
                self.blocks[block_id].token_ids = tokens if full else []
                if full:
                    self.hash_to_block_id[h] = block_id
            self.blocks[block_id].ref_count += 1
            seq.block_table.append(block_id)

    def deallocate(self, seq):
        for block_id in reversed(seq.block_table):
            self.blocks[block_id].ref_count -= 1
            if not self.blocks[block_id].ref_count:
                self.free_block_ids.append(block_id)
        seq.num_cached_tokens = 0
        seq.block_table = []

    def can_append(self, seq):
        return len(self.free_block_ids) >= (len(seq) % self.block_size == 1)

    def may_append(self, seq):
        if len(seq) % self.block_size == 1:
            block_id = self.free_block_ids.popleft()
            self.blocks[block_id].ref_count = 1
            self.blocks[block_id].token_ids = []
            seq.block_table.append(block_id)
