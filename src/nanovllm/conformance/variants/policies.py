"""Other decisions of the scheduler and of its blocks."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import SchedulerConfig
from nanovllm.conformance.planting import plantings_in
from nanovllm.conformance.variants.variant import variant
from nanovllm.engine.block_manager import Block, BlockManager, HashFunction, encode_tokens
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledStep, StepBuilder
from nanovllm.sampling_params import SamplingParams

# ---- which block is reused -----------------------------------------------------------------------


@variant
class MostRecentlyReleasedFirst(BlockManager):
    """Of the free blocks that are published the one released last is reused first."""

    def _take_free_block(self) -> int:
        last = next(reversed(self.free_block_ids))
        first = next(iter(self.free_block_ids))
        if self.blocks[first].prefix is not None:
            self.free_block_ids.move_to_end(last, last=False)
        return super()._take_free_block()


@variant
class PublishedOrNot(BlockManager):
    """Free blocks are reused in order of their release, published or not."""

    def _release(self, block: Block) -> None:
        super()._release(block)
        if block.ref_count == 0:
            self.free_block_ids.move_to_end(block.block_id)


# ---- when blocks are taken and published ---------------------------------------------------------


@variant
class WholePromptAtAdmission(BlockManager):
    """Admission takes the blocks of all known tokens, also where the first chunk is shorter."""

    def allocate(self, seq: Sequence, hits: list[int], num_tokens: int) -> None:
        super().allocate(seq, hits, max(num_tokens, seq.num_tokens))


@variant
class PublishedWhenPlanned(BlockManager):
    """Prompt blocks are published with the plan that writes them, and withdrawn if it fails."""

    def allocate(self, seq: Sequence, hits: list[int], num_tokens: int) -> None:
        super().allocate(seq, hits, num_tokens)
        self.publish(seq, 0, num_tokens)

    def deallocate(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.RUNNING:  # else at the blocks door, where all is computed
            for block_id in seq.block_table[seq.num_computed_tokens // self.block_size :]:
                self._unpublish(self.blocks[block_id])
        super().deallocate(seq)


# ---- who runs ------------------------------------------------------------------------------------


@variant
class MixedSteps(Scheduler):
    """Prompts are computed in what decodes leave of each step's budget."""

    def __init__(self, config: SchedulerConfig, hash_function: HashFunction) -> None:
        super().__init__(replace(config, policy="mixed"), hash_function)


@variant
class LongestGivesWay(Scheduler):
    """The one with the most blocks is preempted, but never the oldest."""

    def _victim(self, seq: Sequence, plan: StepBuilder) -> Sequence:
        planned = {row.seq.seq_id for row in plan.rows}
        others = [s for s in self.running[1:] if s.seq_id not in planned and s is not seq]
        return max(others, key=lambda s: len(s.block_table), default=seq)


@variant
class ShortestFirst(Scheduler):
    """Of those that wait the one with the fewest tokens is admitted first."""

    def _admit(self, plan: StepBuilder) -> None:
        self.waiting.sort(key=lambda seq: (seq.num_tokens, seq.seq_id))
        super()._admit(plan)


@variant
class OneAdmissionAStep(Scheduler):
    """A step admits at most one request."""

    def _admit(self, plan: StepBuilder) -> None:
        later, self.waiting = self.waiting[1:], self.waiting[:1]
        super()._admit(plan)
        self.waiting += later


# ---- what is recomputed --------------------------------------------------------------------------


@variant
class OnlyTheLastToken(Scheduler):
    """Of a prompt that is cached whole, its last token alone is computed again, in its place."""

    def _admit(self, plan: StepBuilder) -> None:
        while self.waiting and self._admit_whole_hit(self.waiting[0], plan):
            pass
        super()._admit(plan)

    def _admit_whole_hit(self, seq: Sequence, plan: StepBuilder) -> bool:
        blocks = self.block_manager
        seats_left = len(self.running) < self.config.max_num_seqs
        if plan.preempted or not (plan.budget and seats_left) or seq.num_tokens % seq.block_size:
            return False
        hits, last = blocks.lookup(seq), seq.num_blocks - 1
        if not seq.cacheable or len(hits) < last:
            return False
        parent = blocks.blocks[hits[-1]].prefix if hits else None
        found = blocks._find(
            blocks._block_hash(seq, last), encode_tokens(seq.block(last)), parent, seq
        )
        if found is None or not blocks.can_allocate([*hits, found.block_id], seq.num_tokens):
            return False
        blocks.allocate(seq, [*hits, found.block_id], seq.num_tokens)
        self._start(seq, seq.num_tokens - 1)
        plan.add(seq, 1)
        return True


# ---- what is refused, and what failed ------------------------------------------------------------


@variant
class CutByThePool(Scheduler):
    """Outputs that the pool cannot hold are cut off instead of refused."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        room = super().validate(num_prompt_tokens, replace(params, max_tokens=None, min_tokens=0))
        return room if params.max_tokens is None else min(room, params.max_tokens)


@variant
class FailedStepsAreRestored(Scheduler):
    """The requests of a step that raised are put back into the queue."""

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        self._land(step)
        ended: list[Sequence] = []
        for row in step.rows:
            if row.seq.abort_requested:
                ended += self._finish(row.seq, FinishReason.ERROR, cause)
            elif row.seq.status is SequenceStatus.RUNNING:
                self._preempt(row.seq)
        return ended


VARIANTS = plantings_in(globals())
