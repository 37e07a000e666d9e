"""SCH-2..7, FRK: what is accepted, how much is planned, and whether it ever ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.conformance.protocol import RequestOptions
from nanovllm.engine.llm_engine import Prompt
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledRow, StepBuilder
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams


def to_the_end(scheduler: Scheduler, num_prompt_tokens: int, params: SamplingParams) -> int:
    """Outputs up to max_model_len, whether the pool can hold them or not."""
    room = scheduler.config.max_model_len - num_prompt_tokens
    return room if params.max_tokens is None else min(params.max_tokens, room)


def num_slots(scheduler: Scheduler) -> int:
    return scheduler.config.num_kvcache_blocks * scheduler.config.kvcache_block_size


# ---- budget and seats ----------------------------------------------------------------------------


@planted("SCH-2")
class BudgetCountsRows(StepBuilder):
    """The budget of tokens is spent by requests, one each."""

    def add(self, seq: Sequence, count: int) -> None:
        self.budget -= 1
        self.rows.append(ScheduledRow.next_of(seq, count))


@planted("SCH-3")
class OneSeatTooMany(Scheduler):
    """Admission compares with `<=` where `<` is right."""

    def _admit(self, plan: StepBuilder) -> None:
        config = self.config
        seats, budget = config.max_num_seqs + 1, config.max_num_batched_tokens + 1
        self.config = replace(config, max_num_seqs=seats, max_num_batched_tokens=budget)
        super()._admit(plan)
        self.config = config


@planted("SCH-4")
class LongRowsAreSplit(StepBuilder):
    """A row of more than a block is planned as two rows of one step."""

    def add(self, seq: Sequence, count: int) -> None:
        super().add(seq, count)
        if count > seq.block_size:
            row = self.rows.pop()
            half = count // 2
            self.rows.append(row._replace(count=half))
            self.rows.append(row._replace(start=row.start + half, count=count - half))


# ---- progress ------------------------------------------------------------------------------------


@planted("SCH-6")
class NobodyGivesWay(Scheduler):
    """A request that needs a block waits for one, and keeps those that it holds."""

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepBuilder) -> bool:
        if not self.block_manager.can_append(seq, num_tokens):
            return False
        return super()._make_room(seq, num_tokens, plan)


@planted("SCH-6")
class PromptsAlwaysGoFirst(Scheduler):
    """As long as new prompts arrive, nobody who waits to decode gets a row."""

    def _plan_prefill_first(self, plan: StepBuilder) -> None:
        self._prefill_streak = 0
        super()._plan_prefill_first(plan)


@planted("SCH-16")
class BatchWaitsForItsSlowest(Scheduler):
    """Static batching: nobody joins before everybody has ended."""

    def _admit(self, plan: StepBuilder) -> None:
        if not self.running:
            super()._admit(plan)


# ---- what is accepted ----------------------------------------------------------------------------


@planted("SCH-7a")
class EmptyPromptIsAccepted(Scheduler):
    """Nothing checks that a prompt has a token."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return super().validate(max(1, num_prompt_tokens), params)


@planted("SCH-7a")
class PromptBeyondThePoolIsAccepted(Scheduler):
    """A prompt that the whole cache cannot hold is queued, and waits at its head for ever."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if num_slots(self) < num_prompt_tokens < self.config.max_model_len:
            return to_the_end(self, num_prompt_tokens, params)
        return super().validate(num_prompt_tokens, params)


@planted("SCH-7a")
class PromptAsLongAsTheModel(Scheduler):
    """A prompt of max_model_len tokens is accepted, though there is no room for an output."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if num_prompt_tokens == self.config.max_model_len <= num_slots(self):
            return 1
        return super().validate(num_prompt_tokens, params)


@planted("SCH-7a")
class AssertsInsteadOfRefusing(Scheduler):
    """What can never run fails an assertion."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        try:
            return super().validate(num_prompt_tokens, params)
        except ValueError as error:
            raise AssertionError from error


@planted("SCH-7b")
class MaxTokensIsRepaired(ReferenceCore):
    """A max_tokens of 0 is taken for 1, and one of 1.5 too."""

    def add(self, request: int, prompt: Seq[int], max_tokens: int, options: RequestOptions) -> None:
        super().add(request, prompt, max(1, int(max_tokens)), options)


@planted("SCH-7c", door="engine")
class AnyTokenIdIsAccepted(LLM):
    """Token ids are not compared with the vocabulary; those beyond it wrap around."""

    def encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return super().encode(prompt)
        return [token_id % self.model_config.vocab_size for token_id in prompt]


@planted("SCH-7d")
class OneBeyondTheModelLength(Scheduler):
    """A request that is cut by max_model_len gets one output more than that."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        room = super().validate(num_prompt_tokens, params)
        cut = params.max_tokens is None or room < params.max_tokens
        return room + 1 if cut and num_prompt_tokens + room <= num_slots(self) else room


@planted("SCH-7d")
class OutputsBeyondThePool(Scheduler):
    """Outputs that the pool cannot hold are accepted, and the request preempts itself for ever."""

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        if 1 <= num_prompt_tokens <= min(num_slots(self), self.config.max_model_len - 1):
            return to_the_end(self, num_prompt_tokens, params)
        return super().validate(num_prompt_tokens, params)


# ---- several samples -----------------------------------------------------------------------------


@planted("FRK-1")
class SamplesShareTheirTokens(Scheduler):
    """max_tokens is divided among the samples of a request."""

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        samples = super().add(prompt_token_ids, params, salt=salt)
        for seq in samples:
            seq.max_tokens = max(1, seq.max_tokens // params.n)
        return samples


@planted("FRK-2")
class EachSampleComputesThePrompt(Scheduler):
    """All samples are queued at once, so that those of one step cannot share."""

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        samples = super().add(prompt_token_ids, params, salt=salt)
        self.waiting += self.followers.pop(samples[0].seq_id, [])
        return samples


@planted("FRK-3")
class SamplesWantAllSeatsAtOnce(Scheduler):
    """A request is admitted only when each of its samples can have a seat."""

    def _admit(self, plan: StepBuilder) -> None:
        if self.waiting:
            num_samples = 1 + len(self.followers.get(self.waiting[0].seq_id, ()))
            if len(self.running) + num_samples > self.config.max_num_seqs:
                return
        super()._admit(plan)


FAULTS = plantings_in(globals())
