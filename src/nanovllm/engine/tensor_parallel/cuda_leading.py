"""The runner of rank 0 on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.engine.cuda_runner import CudaModelRunner
from nanovllm.engine.decode_state import Int32, SeatUpdates
from nanovllm.engine.interrupts import interrupts_held
from nanovllm.engine.model_input import ModelInput
from nanovllm.engine.model_runner import PendingStep, StepResult
from nanovllm.engine.step import ScheduledStep
from nanovllm.engine.tensor_parallel.leading import Leading
from nanovllm.engine.tensor_parallel.ranks import Ranks


class LeadingCudaRunner(Leading, CudaModelRunner):
    """See `CudaModelRunner`; a decode step of all ranks is a graph on each."""

    def launch(self, step: ScheduledStep) -> PendingStep:
        return GuardedStep(super().launch(step), self.ranks)

    def update(self, updates: SeatUpdates) -> None:
        if updates.is_empty:
            return
        with self.told("update", updates):
            super().update(updates)

    def compute_logits(self, inputs: ModelInput) -> torch.Tensor:
        with self.told("compute_logits", inputs):
            return super().compute_logits(inputs)

    def decode(self, seats: Int32, context_lens: Int32, new_blocks: Int32) -> torch.Tensor:
        with self.told("decode", seats, context_lens, new_blocks):
            return super().decode(seats, context_lens, new_blocks)

    def keep_tokens(self, seats: Int32, tokens: torch.Tensor | None = None) -> None:
        with self.told("keep_tokens", seats):
            super().keep_tokens(seats, tokens)

    def examine(self) -> None:
        """Nothing to find out: what breaks a step of several ranks is in `fault`."""


@dataclass(frozen=True, slots=True)
class GuardedStep:
    """A step whose tokens count only if all ranks took part."""

    pending: PendingStep
    ranks: Ranks

    def result(self) -> StepResult:
        with interrupts_held(), self.ranks.guarded():
            outcome = self.pending.result()
        self.ranks.check()
        return outcome
