"""The reference engine behind all three doors; no other adapter imports it.

The blocks door and the core door are one object: both act on the scheduler that `reset` makes, the
former on its block manager alone. Faults and variants are planted by handing over another class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version

import numpy as np

from nanovllm.config import SchedulerConfig
from nanovllm.conformance.adapters.reference_engine import ReferenceEngine
from nanovllm.conformance.protocol import (
    CORE_CAPABILITIES,
    CacheStats,
    Finished,
    Hello,
    Plan,
    PoolView,
    Published,
    Refused,
    RequestId,
    RequestOptions,
    Row,
    World,
)
from nanovllm.engine.block_manager import HashFunction, hash_block
from nanovllm.engine.model_input import prepare_model_input
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.sampling_params import SamplingParams

SchedulerFactory = Callable[[SchedulerConfig, HashFunction], Scheduler]


def constant_hash(tokens: bytes, parent_hash: bytes) -> bytes:
    return b"same"


def one_bit_hash(tokens: bytes, parent_hash: bytes) -> bytes:
    return bytes([sum(tokens + parent_hash) % 2])


HASHES: Mapping[str, HashFunction] = {
    "real": hash_block,
    "constant": constant_hash,
    "1bit": one_bit_hash,
}


class ReferenceCore:
    """The blocks and core doors; see `protocol.BlocksDoor` and `protocol.CoreDoor`.

    Args:
        scheduler_class: makes the scheduler, from its configuration and a hash function.
    """

    doors: tuple[str, ...] = ("blocks", "core")
    capabilities: frozenset[str] = CORE_CAPABILITIES - {"cow"}

    def __init__(self, scheduler_class: SchedulerFactory = Scheduler) -> None:
        self.scheduler_class = scheduler_class

    def hello(self) -> Hello:
        return Hello("reference", version("nanovllm"), self.doors, self.capabilities)

    def reset(self, world: World) -> None:
        """Raises Refused for a configuration that the engine refuses (SCH-2)."""
        try:
            config = SchedulerConfig(
                max_num_seqs=world.max_num_seqs,
                max_num_batched_tokens=world.max_num_batched_tokens,
                max_model_len=world.max_model_len,
                num_kvcache_blocks=world.num_blocks,
                kvcache_block_size=world.block_size,
                eos_token_ids=frozenset(world.eos_token_ids),
                enable_prefix_caching=world.prefix_cache,
                seed=0,
                **world.options,
            )
        except ValueError as error:
            raise Refused(str(error)) from error
        self.hash_function = HASHES[world.hash]
        self.scheduler = self.scheduler_class(config, self.hash_function)
        self._ids: dict[int, RequestId] = {}  # by seq_id
        self._samples: dict[int, tuple[EngineSequence, ...]] = {}  # by request, core door
        self._holders: dict[int, EngineSequence] = {}  # by request, blocks door
        self._steps: dict[int, ScheduledStep] = {}  # in flight

    # ---- core ------------------------------------------------------------------------------

    def add(
        self, request: int, prompt: Sequence[int], max_tokens: int, options: RequestOptions
    ) -> None:
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=options.ignore_eos,
                n=options.n,
                stop_token_ids=tuple(options.stop_token_ids),
                min_tokens=options.min_tokens,
                seed=request,
            )
            seqs = self.scheduler.add(list(prompt), params, salt=options.salt)
        except ValueError as error:
            raise Refused(str(error)) from error
        self._samples[request] = seqs
        self._ids.update((seq.seq_id, RequestId(request, i)) for i, seq in enumerate(seqs))

    def schedule(self) -> Plan:
        step = self.scheduler.schedule()
        self._steps[step.step_id] = step
        return Plan(
            step=step.step_id,
            rows=tuple(
                Row(
                    id=self._ids[row.seq.seq_id],
                    start=row.start,
                    count=row.count,
                    block_table=tuple(row.block_table),
                    phase="decode" if row.is_decode else "prefill",
                )
                for row in step.rows
            ),
            preempted=tuple(self._ids[seq.seq_id] for seq in step.preempted),
        )

    def commit(self, step: int, tokens: Mapping[RequestId, int]) -> list[Finished]:
        planned = self._steps.pop(step)
        if not planned.rows:
            return []
        by_seq = {row.seq.seq_id: self._ids[row.seq.seq_id] for row in planned.rows}
        sampled = {seq_id: tokens[id] for seq_id, id in by_seq.items() if id in tokens}
        return self._finished(self.scheduler.commit(planned, sampled))

    def abort(self, request: int) -> bool:
        seqs = self._samples.get(request, ())
        # From the last sample: the others end with sample 0 if it has not computed the prompt.
        took = [self.scheduler.abort(seq.seq_id) for seq in reversed(seqs)]
        return any(took)

    def fail_step(self, step: int) -> list[Finished]:
        """Steps planned behind it count on what it was to compute, so they are void too."""
        void = [flight for flight in self.scheduler.in_flight if flight.step_id >= step]
        ended = [seq for flight in void for seq in self.scheduler.fail_step(flight, "it raised")]
        self._steps.clear()
        return self._finished(ended)

    def _finished(self, seqs: Iterable[EngineSequence]) -> list[Finished]:
        return [Finished(self._ids[seq.seq_id], str(seq.finish_reason)) for seq in seqs]

    def hash(self, token_ids: Sequence[int], parent: str | None) -> str:
        tokens = np.array(token_ids, dtype="<i4").tobytes()
        return self.hash_function(tokens, bytes.fromhex(parent or "")).hex()

    def wire(self, id: RequestId) -> int:
        """Bytes of the arrays that a worker would be sent for this row."""
        row = next(
            row
            for step in self._steps.values()
            for row in step.rows
            if self._ids[row.seq.seq_id] == id
        )
        block_size = self.scheduler.config.kvcache_block_size
        arrays = prepare_model_input(ScheduledStep(0, (row,)), block_size)
        return sum(getattr(arrays, name).nbytes for name in arrays.__slots__)

    def stats(self) -> CacheStats:
        totals = self.scheduler.stats
        return CacheStats(totals.num_lookup_tokens, totals.num_cached_tokens)

    # ---- blocks ----------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int]) -> int:
        # A lookup leaves the last token to compute, so one more lets it ask for every full block.
        hits = self.scheduler.block_manager.lookup(self._sequence(-1, [*token_ids, 0]))
        return len(hits) * self.scheduler.config.kvcache_block_size

    def allocate(self, request: int, token_ids: Sequence[int]) -> tuple[list[int], int] | None:
        blocks = self.scheduler.block_manager
        seq = self._sequence(request, token_ids)
        hits = blocks.lookup(seq)
        if not blocks.can_allocate(hits, seq.num_tokens):
            return None
        blocks.allocate(seq, hits, seq.num_tokens)
        num_cached = len(hits) * blocks.block_size
        blocks.publish(seq, num_cached, seq.num_tokens)
        self._holders[request] = seq
        return list(seq.block_table), num_cached

    def append(self, request: int, token_id: int) -> list[int] | None:
        blocks = self.scheduler.block_manager
        seq = self._holders[request]
        if not blocks.can_append(seq, seq.num_tokens + 1):
            return None
        seq.append_token(token_id)
        blocks.may_append(seq, seq.num_tokens)
        blocks.publish(seq, seq.num_tokens - 1, seq.num_tokens)
        return list(seq.block_table)

    def release(self, request: int) -> None:
        self.scheduler.block_manager.deallocate(self._holders.pop(request))

    def _sequence(self, seq_id: int, token_ids: Sequence[int]) -> EngineSequence:
        config = self.scheduler.config
        return EngineSequence(
            seq_id,
            list(token_ids),
            SamplingParams(),
            block_size=config.kvcache_block_size,
            max_tokens=1,
            cacheable=config.enable_prefix_caching,
        )

    def pool(self) -> PoolView:
        blocks = self.scheduler.block_manager
        return PoolView(
            free=tuple(blocks.free_block_ids),
            ref_counts={b.block_id: b.ref_count for b in blocks.blocks if b.ref_count},
            published=tuple(
                Published(block_id, self._content(block_id))
                for block_ids in blocks.hash_to_block_ids.values()
                for block_id in block_ids
            ),
        )

    def _content(self, block_id: int) -> tuple[int, ...]:
        """A block that the map names but that was not published holds nothing."""
        prefix = self.scheduler.block_manager.blocks[block_id].prefix
        return tuple(np.frombuffer(prefix.tokens, dtype="<i4").tolist()) if prefix else ()


class Reference(ReferenceCore, ReferenceEngine):
    """All three doors."""

    doors = ReferenceCore.doors + ReferenceEngine.doors
    capabilities = ReferenceCore.capabilities | ReferenceEngine.capabilities

    def __init__(self) -> None:
        ReferenceCore.__init__(self)
        ReferenceEngine.__init__(self)
