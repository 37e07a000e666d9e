"""SEQ: what a request knows of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.engine.model_input import ModelInput, prepare_model_input
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import FinishReason, Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.sampling_params import SamplingParams


@planted("SEQ-1", door="unit")
class SamplesTakeOneId(Scheduler):
    """A request of several samples counts as one id, so the next request repeats some of them."""

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        samples = super().add(prompt_token_ids, params, salt=salt)
        self._next_seq_id = samples[0].seq_id + 1
        return samples


@planted("SEQ-2", door="unit")
class EndIsNotFinal(Scheduler):
    """A request that is aborted while it waits is taken out of the queue and goes on waiting."""

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None
    ) -> list[Sequence]:
        before = seq.status
        ended = super()._finish(seq, reason, error)
        if reason is FinishReason.ABORT:
            seq.status = before
        return ended


@planted("SEQ-3", door="unit")
class LastBlockIsEmpty(Sequence):
    """The fill of the last block is n % block_size, which is 0 when it is full."""

    __slots__ = ()

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens % self.block_size


@planted("SEQ-3", door="unit")
class AlwaysOneMoreBlock(Sequence):
    """The blocks of n tokens are counted as n // block_size + 1."""

    __slots__ = ()

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.block_size + 1


@planted("SEQ-4", door="unit")
class LastBlockIsFilledUp(Sequence):
    """The last block is taken from the end of the tokens, so a short one repeats its ancestor."""

    __slots__ = ()

    def block(self, i: int) -> list[int]:
        if i == self.num_blocks - 1:
            return self.token_ids[-self.block_size :]
        return super().block(i)


@planted("SEQ-5", door="unit")
class CallersListIsKept(Sequence):
    """The caller's list becomes the sequence's own."""

    __slots__ = ()

    def __init__(
        self, seq_id: int, token_ids: list[int], params: SamplingParams, **rest: Any
    ) -> None:
        super().__init__(seq_id, token_ids, params, **rest)
        self.token_ids = token_ids


@planted("SEQ-6", instead_of=prepare_model_input)
def all_tokens_are_sent(step: ScheduledStep, block_size: int) -> ModelInput:
    """Every row carries all tokens of its request."""
    inputs = prepare_model_input(step, block_size)
    tokens = [token for row in step.rows for token in row.seq.token_ids]
    return replace(inputs, input_ids=np.array(tokens, dtype=np.int64))


class _Shared:
    """An attribute with one value for all objects."""

    value: Any = None

    def __get__(self, instance: object, owner: type) -> Any:
        return self.value

    def __set__(self, instance: object, value: Any) -> None:
        self.value = value


@planted("SEQ-7", door="unit")
class BlockSizeOfTheClass(Sequence):
    """The block size is an attribute of the class, which the engine made last decides for all."""

    __slots__ = ()

    block_size = _Shared()


FAULTS = plantings_in(globals())
