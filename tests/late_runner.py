"""A model runner on the CPU that hands its tokens over late, as one on a GPU does."""

import numpy as np
import torch

from nanovllm.engine.model_input import name_pending_tokens, prepare_model_input
from nanovllm.engine.model_runner import (
    DoneStep,
    ModelRunner,
    PendingStep,
    StepResult,
    by_sequence,
    sampling_row,
)
from nanovllm.engine.step import ScheduledStep
from nanovllm.layers.sampler import SamplingInput


class LateRunner(ModelRunner):
    """A step is launched from what it remembers of the last tokens, not from what the host knows.

    `fail_launch` and `fail_result` hold the numbers of steps that raise.
    """

    steps_ahead = 1
    fail_launch: frozenset[int] = frozenset()
    fail_result: frozenset[int] = frozenset()

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> PendingStep:
        if step.step_id in self.fail_launch:
            raise RuntimeError("launch failed")
        self.last_tokens = getattr(self, "last_tokens", {})
        inputs = prepare_model_input(step, self.block_size)
        name_pending_tokens(inputs, np.arange(len(step.rows), dtype=np.int32))
        for i in np.flatnonzero(inputs.input_ids < 0):
            seq = step.rows[-1 - inputs.input_ids[i]].seq
            inputs.input_ids[i] = self.last_tokens[seq.seq_id]
        logits = self.compute_logits(inputs)
        rows = [row for row in step.rows if row.samples]
        eos = self.model_config.eos_token_ids
        sampling = [sampling_row(row.seq, eos)._replace(position=row.end) for row in rows]
        result = StepResult()
        if rows:
            output = self.sampler(logits, SamplingInput.from_rows(sampling))
            result = by_sequence([row.seq for row in rows], output)
        self.last_tokens |= result.token_ids
        return BrokenStep() if step.step_id in self.fail_result else DoneStep(result)

    def needs_last_tokens(self, step: ScheduledStep) -> bool:
        return not all(row.seq.params.is_plain for row in step.rows if row.samples)


class BrokenStep:
    """A step whose device reports an error."""

    def result(self) -> None:
        raise RuntimeError("result failed")
