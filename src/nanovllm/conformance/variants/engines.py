"""Engines that offer more than the reference, or less."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import SchedulerConfig
from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.planting import plantings_in
from nanovllm.conformance.protocol import Plan, World
from nanovllm.conformance.variants.variant import variant
from nanovllm.engine.block_manager import HashFunction
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepBuilder
from nanovllm.sampling_params import SamplingParams


@variant
class CopyOnWrite(ReferenceCore):
    """A sample copies the partly filled block of its prompt and computes one token of it."""

    capabilities = ReferenceCore.capabilities | {"cow"}

    def __init__(self, scheduler_class: object = None) -> None:
        super().__init__(_Copying)

    def schedule(self) -> Plan:
        plan = super().schedule()
        scheduler = self.scheduler
        assert isinstance(scheduler, _Copying)
        copies, scheduler.copies = tuple(scheduler.copies), []
        return replace(plan, copies=copies)


class _Copying(Scheduler):
    def __init__(self, config: SchedulerConfig, hash_function: HashFunction) -> None:
        super().__init__(config, hash_function)
        self.leaders: dict[int, Sequence] = {}
        self.copies: list[tuple[int, int]] = []

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        samples = super().add(prompt_token_ids, params, salt=salt)
        self.leaders.update((seq.seq_id, samples[0]) for seq in samples[1:])
        return samples

    def _admit(self, plan: StepBuilder) -> None:
        while self.waiting and self._admit_copy(self.waiting[0], plan):
            pass
        super()._admit(plan)

    def _admit_copy(self, seq: Sequence, plan: StepBuilder) -> bool:
        """Admit a sample whose leader holds, and has computed, its whole prompt."""
        blocks, leader, last = self.block_manager, self.leaders.get(seq.seq_id), seq.num_tokens - 1
        seats_left = len(self.running) < self.config.max_num_seqs
        if leader is None or seq.num_completion_tokens or not (plan.budget and seats_left):
            return False
        hits, i = blocks.lookup(seq), last // seq.block_size
        if plan.preempted or len(hits) < i or leader.num_computed_tokens <= last:
            return False
        if len(leader.block_table) <= i or not blocks.can_allocate(hits, seq.num_tokens):
            return False
        blocks.allocate(seq, hits, seq.num_tokens)
        self.copies.append((leader.block_table[i], seq.block_table[i]))
        self._start(seq, last)
        plan.add(seq, 1)
        return True


@variant
class NoChunks(ReferenceCore):
    """Prompts are computed whole, and what could outgrow a step is refused."""

    capabilities = ReferenceCore.capabilities - {"chunked_prefill"}

    def __init__(self, scheduler_class: object = None) -> None:
        super().__init__(_Whole)


class _Whole(Scheduler):
    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        max_tokens = super().validate(num_prompt_tokens, params)
        stored, budget = num_prompt_tokens + max_tokens - 1, self.config.max_num_batched_tokens
        if stored > budget:
            raise ValueError(f"{num_prompt_tokens} + {max_tokens} - 1 = {stored} tokens, {budget}")
        return max_tokens

    def _admit(self, plan: StepBuilder) -> None:
        later: list[Sequence] = []
        while self.waiting:
            seq = self.waiting[0]
            cached = len(self.block_manager.lookup(seq)) * seq.block_size
            if seq.num_tokens - cached > plan.budget:
                break
            later, self.waiting = self.waiting[1:], [seq]
            super()._admit(plan)
            admitted = not self.waiting
            self.waiting += later
            if not admitted:
                break


@variant
class NoPrefixCache(ReferenceCore):
    """Nothing is shared between requests."""

    capabilities = ReferenceCore.capabilities - {
        "prefix_cache",
        "hash",
        "hash_override",
        "salt",
        "stats",
    }

    def reset(self, world: World) -> None:
        super().reset(replace(world, prefix_cache=False))


@variant
class NothingToSee(ReferenceCore):
    """An engine of plans and tokens, and no other call."""

    capabilities = frozenset({"chunked_prefill", "prefix_cache"})


VARIANTS = plantings_in(globals())
