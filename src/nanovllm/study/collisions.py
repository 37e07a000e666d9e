"""Collisions: what a hash chain finds under a weak hash, and what an engine that trusts it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nanovllm.conformance.verdicts import Violation
from nanovllm.engine.block_manager import Block, BlockManager, HashFunction, Prefix, hash_block
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.study.indexes import run_index
from nanovllm.study.workloads import Talk

BLOCK_SIZE = 16


def truncated(bits: int) -> HashFunction:
    """The engine's hash, of which this many bits are left."""

    def weak(tokens: bytes, parent_hash: bytes) -> bytes:
        value = int.from_bytes(hash_block(tokens, parent_hash), "little") & ((1 << bits) - 1)
        return value.to_bytes(16, "little")

    return weak


class Counting(BlockManager):
    """Counts what the comparison of whole histories prevents.

    Attributes:
        num_found: times that somebody was found under a hash.
        num_compared: histories compared.
        num_wrong: times that the first one found was of another history.
        num_same_tokens: of these, the ones whose own tokens were the same.
    """

    num_found = num_compared = num_wrong = num_same_tokens = 0

    def _find(
        self, block_hash: bytes, tokens: bytes, parent: Prefix | None, seq: EngineSequence
    ) -> Block | None:
        ids = list(self.hash_to_block_ids.get(block_hash, ()))
        right = super()._find(block_hash, tokens, parent, seq)
        self.num_compared += ids.index(right.block_id) + 1 if right else len(ids)
        if ids and (right is None or right.block_id != ids[0]):
            first = self.blocks[ids[0]].prefix
            assert first is not None
            self.num_wrong += 1
            self.num_same_tokens += first.tokens == tokens
        self.num_found += bool(ids)
        return right


class Trusting(BlockManager):
    """Takes whom it finds under a hash, as an engine that compares nothing."""

    def _find(
        self, block_hash: bytes, tokens: bytes, parent: Prefix | None, seq: EngineSequence
    ) -> Block | None:
        ids = self.hash_to_block_ids.get(block_hash, ())
        return next((self.blocks[block_id] for block_id in ids), None)


@dataclass(frozen=True, slots=True)
class Collisions:
    """One width of the hash on one workload; see `Counting`.

    Attributes:
        trust: what the suite says of an engine that trusts this hash.
    """

    bits: int
    hit_share: float
    num_found: int
    num_compared: int
    num_wrong: int
    num_same_tokens: int
    trust: str
    num_checks: int


def collide(bits: int, talks: Sequence[Talk], num_slots: int) -> Collisions:
    weak = truncated(bits)
    result, counting = run_index(
        partial(Counting, hash_function=weak), talks, BLOCK_SIZE, num_slots
    )
    assert isinstance(counting, Counting)
    return Collisions(
        bits,
        result.hit_share,
        counting.num_found,
        counting.num_compared,
        counting.num_wrong,
        counting.num_same_tokens,
        verdict_on_trust(weak, talks, num_slots),
        result.evaluations.total(),
    )


def verdict_on_trust(weak: HashFunction, talks: Sequence[Talk], num_slots: int) -> str:
    try:
        run_index(partial(Trusting, hash_function=weak), talks, BLOCK_SIZE, num_slots)
    except Violation as violation:
        return f"breaks {violation.spec_id}"
    return "nothing found"
