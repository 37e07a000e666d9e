"""Which replica gets a request: the one that has seen its prefix, or the one with least to do."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from nanovllm.engine.block_manager import encode_tokens, hash_block

FIRST_BLOCKS: Final = 64
"""Blocks of a prompt that are looked at: what tells prefixes apart is at their beginning."""


class Router:
    """Remembers the prefixes that each replica was sent lately, and what it has still to do.

    A prefix is known by the chained hashes of its full blocks, as in `BlockManager`. Here a hash is
    only a hint: a collision sends a request to the wrong replica, which computes it all the same.

    Args:
        size: replicas, `0..size-1`.
        block_size: tokens per block of the replicas' caches.
        capacity: blocks remembered per replica, those of its cache; 0 makes load decide alone.
        max_lead: work that a replica may have beyond the least loaded one and still be chosen for
            its prefixes. Work counts in tokens of output.
    """

    def __init__(self, size: int, *, block_size: int, capacity: int, max_lead: int) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.max_lead = max_lead
        self._loads = dict.fromkeys(range(size), 0)
        # Of each replica, the least recently sent hash first.
        self._seen: dict[int, OrderedDict[bytes, None]] = {i: OrderedDict() for i in range(size)}

    @property
    def replicas(self) -> list[int]:
        """Those that are left."""
        return list(self._loads)

    def load(self, replica: int) -> int:
        """Work that it has to do."""
        return self._loads[replica]

    def route(self, token_ids: list[int], cost: int, salt: str | None = None) -> int:
        """Choose a replica for a prompt, and note both; `release` gives the `cost` back.

        Among the replicas within `max_lead`, the one that was sent the longest prefix of it; of
        several the least loaded, and of these the first.
        """
        hashes = self._hashes(token_ids, salt)
        limit = min(self._loads.values()) + self.max_lead
        _, _, replica = min(
            (-self._num_seen(replica, hashes), load, replica)
            for replica, load in self._loads.items()
            if load <= limit
        )
        self._loads[replica] += cost
        self._remember(replica, hashes)
        return replica

    def release(self, replica: int, cost: int) -> None:
        """A request of this cost has ended."""
        self._loads[replica] -= cost
        assert self._loads[replica] >= 0

    def lose(self, replica: int) -> None:
        """Choose it no more."""
        del self._loads[replica], self._seen[replica]

    def forget(self) -> None:
        """The caches were reset."""
        for seen in self._seen.values():
            seen.clear()

    def _hashes(self, token_ids: list[int], salt: str | None) -> list[bytes]:
        # A cache leaves the last token to compute, so it does not look for a block that ends there.
        num_blocks = min((len(token_ids) - 1) // self.block_size, FIRST_BLOCKS)
        hashes: list[bytes] = []
        parent = (salt or "").encode()
        for start in range(0, num_blocks * self.block_size, self.block_size):
            parent = hash_block(encode_tokens(token_ids[start : start + self.block_size]), parent)
            hashes.append(parent)
        return hashes

    def _num_seen(self, replica: int, hashes: list[bytes]) -> int:
        seen = self._seen[replica]
        return next((i for i, block in enumerate(hashes) if block not in seen), len(hashes))

    def _remember(self, replica: int, hashes: list[bytes]) -> None:
        seen = self._seen[replica]
        for block in reversed(hashes):  # a block is forgotten before its ancestors
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self.capacity:
            seen.popitem(last=False)
