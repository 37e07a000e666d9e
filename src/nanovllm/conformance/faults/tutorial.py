"""What the tutorial's own code gets wrong, each defect alone, in the reference.

Defects of workers, of their shared memory and of CUDA graphs need several processes or a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.engine.block_manager import Block, BlockManager, Prefix
from nanovllm.engine.model_input import ModelInput, prepare_model_input
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledRow, ScheduledStep, StepBuilder
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.sampler import RowSampling, SamplingInput


@planted("PFX-6")
class WholePromptLeavesNothing(Scheduler):
    """A prompt that is cached whole gets a row of zero tokens."""

    def _admit(self, plan: StepBuilder) -> None:
        blocks = self.block_manager
        if not self.waiting or len(self.running) == self.config.max_num_seqs:
            return
        seq = self.waiting[0]
        # One token more asks for every full block of those that are known.
        seq.append_token(0)
        hits = blocks.lookup(seq)
        del seq.token_ids[-1]
        if len(hits) * seq.block_size < seq.num_tokens or not blocks.can_allocate(hits, len(seq)):
            super()._admit(plan)
            return
        blocks.allocate(seq, hits, seq.num_tokens)
        self._start(seq, seq.num_tokens)
        plan.rows.append(ScheduledRow.next_of(seq, 0))


@planted("PFX-2")
class StaleEntryAndOwnTokens(BlockManager):
    """The map keeps entries of reused blocks, and a hit is checked by the block's own tokens."""

    def _unpublish(self, block: Block) -> None:
        block.prefix = None

    def _find(
        self, block_hash: bytes, tokens: bytes, parent: Prefix | None, seq: Sequence
    ) -> Block | None:
        for block_id in self.hash_to_block_ids.get(block_hash, ()):
            prefix = self.blocks[block_id].prefix
            if prefix is not None and prefix.tokens == tokens:
                return self.blocks[block_id]
        return None


@planted("PFX-4")
class AllocationPublishes(BlockManager):
    """Blocks are published as they are allocated, and stay so when their step fails."""

    def allocate(self, seq: Sequence, hits: list[int], num_tokens: int) -> None:
        super().allocate(seq, hits, num_tokens)
        self.publish(seq, 0, num_tokens)


@planted("SCH-6")
class FullLengthAgainstTheBudget(Scheduler):
    """A sequence is admitted only if all of its tokens fit one step."""

    def _admit(self, plan: StepBuilder) -> None:
        if self.waiting and self.waiting[0].num_tokens > plan.budget:
            return
        super()._admit(plan)


@planted("SEQ-6", instead_of=prepare_model_input)
def resumed_requests_send_one_token(step: ScheduledStep, block_size: int) -> ModelInput:
    """Whoever has sampled once sends its last token only, also to compute all of them again."""
    inputs = prepare_model_input(step, block_size)
    tokens = [
        row.seq.token_ids[-1:] if row.seq.num_completion_tokens else row.seq.token_ids[row.start :]
        for row in step.rows
    ]
    return replace(inputs, input_ids=np.array([t for row in tokens for t in row], dtype=np.int64))


@planted("SCH-5")
class IdleIsAnAssertion(Scheduler):
    """A plan without rows is taken for a defect of the scheduler."""

    def schedule(self) -> ScheduledStep:
        step = super().schedule()
        assert step.rows
        return step


@planted("SCH-3")
class SeatsOfOneStep(Scheduler):
    """max_num_seqs bounds the rows of a step, and every step admits that many more."""

    def _admit(self, plan: StepBuilder) -> None:
        config = self.config
        seats = len(self.running) + config.max_num_seqs - len(plan.rows)
        budget = max(seats, config.max_num_batched_tokens)
        self.config = replace(config, max_num_seqs=seats, max_num_batched_tokens=budget)
        super()._admit(plan)
        self.config = config


@planted("MOD-3", door="unit")
class NormChangesItsInput(RMSNorm):
    """The norm's casts copy nothing when the input is fp32 already, and it works in place."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is not None:
            return super().forward(x, residual)
        x32 = x.float()
        x32.mul_(torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + self.eps))
        return self.weight * x32.to(x.dtype)


@planted("SMP-1", door="engine")
class ThereIsNoGreedyMode(SamplingInput):
    """Temperature 0 draws like 1."""

    @classmethod
    def from_rows(cls, rows: Seq[RowSampling]) -> SamplingInput:
        inp = super().from_rows(rows)
        return replace(inp, temperature=np.where(inp.temperature > 0, inp.temperature, 1))


FAULTS = plantings_in(globals())
