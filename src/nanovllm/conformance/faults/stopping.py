"""SCH-12, STP: when a request ends, and what becomes of its text."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import replace

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.conformance.protocol import RequestOptions
from nanovllm.engine import detokenizer
from nanovllm.engine.detokenizer import Detokenizer, Tokenizer
from nanovllm.engine.model_runner import sampling_row
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import FinishReason, Sequence
from nanovllm.layers.sampler import RowSampling
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

# ---- ids and lengths -----------------------------------------------------------------------------


@planted("SCH-12a")
class FirstTokenIsNeverTheLast(Scheduler):
    """The token sampled by the prompt's own step is not compared with the eos ids."""

    def _is_stop_token(self, seq: Sequence, token_id: int) -> bool:
        return seq.num_completion_tokens > 1 and super()._is_stop_token(seq, token_id)


@planted("SCH-12a")
class IgnoreEosIsIgnored(Scheduler):
    """A request that wants to go on behind an eos ends there."""

    def _is_stop_token(self, seq: Sequence, token_id: int) -> bool:
        return token_id in self.config.eos_token_ids or super()._is_stop_token(seq, token_id)


@planted("SCH-12b")
class OneOutputTooMany(Scheduler):
    """The length is checked before the token is appended."""

    def _append(self, seq: Sequence, token_id: int, stopped: bool) -> FinishReason | None:
        seq.max_tokens += 1
        reason = super()._append(seq, token_id, stopped)
        seq.max_tokens -= 1
        return reason


@planted("SCH-12b")
class MaxTokensCountThePrompt(Scheduler):
    """max_tokens is taken for the length of prompt and output together."""

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        samples = super().add(prompt_token_ids, params, salt=salt)
        for seq in samples:
            seq.max_tokens = max(1, seq.max_tokens - seq.num_prompt_tokens)
        return samples


@planted("SCH-12c")
class IgnoreEosIgnoresStopIds(Scheduler):
    """`ignore_eos` switches off a request's own stop ids as well."""

    def _is_stop_token(self, seq: Sequence, token_id: int) -> bool:
        return not seq.params.ignore_eos and super()._is_stop_token(seq, token_id)


@planted("SCH-12c")
class StopIdsAreForgotten(Scheduler):
    """Only eos ids end a request."""

    def _is_stop_token(self, seq: Sequence, token_id: int) -> bool:
        return token_id in self.config.eos_token_ids and super()._is_stop_token(seq, token_id)


@planted("SCH-12d")
class LengthWinsOverStop(Scheduler):
    """A stop at the last allowed token is told as `length`."""

    def _append(self, seq: Sequence, token_id: int, stopped: bool) -> FinishReason | None:
        reason = super()._append(seq, token_id, stopped)
        at_the_end = seq.num_completion_tokens == seq.max_tokens
        return FinishReason.LENGTH if reason and at_the_end else reason


@planted("STP-1", door="engine")
class OneEosIsEnough(LLM):
    """Of several eos ids only the first is known."""

    def _make_scheduler(self) -> Scheduler:
        first = sorted(self.model_config.eos_token_ids)[:1]
        self.model_config = replace(self.model_config, eos_token_ids=frozenset(first))
        return super()._make_scheduler()


@planted("STP-2", instead_of=sampling_row, door="engine")
def min_tokens_mask_nothing(seq: Sequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """Before min_tokens an eos ends nothing, but it is drawn and stays in the output."""
    return sampling_row(seq, eos_token_ids)._replace(banned_token_ids=())


@planted("STP-2", instead_of=sampling_row, door="engine")
def min_tokens_mask_one_eos(seq: Sequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """Before min_tokens one of several eos ids is masked."""
    row = sampling_row(seq, eos_token_ids)
    return row._replace(banned_token_ids=sorted(row.banned_token_ids)[:1])


@planted("STP-2")
class MinTokensAreLowered(ReferenceCore):
    """A min_tokens above max_tokens is lowered in silence instead of refused."""

    def add(self, request: int, prompt: Seq[int], max_tokens: int, options: RequestOptions) -> None:
        least = min(options.min_tokens, max_tokens)
        super().add(request, prompt, max_tokens, replace(options, min_tokens=least))


# ---- text ----------------------------------------------------------------------------------------


@planted("STP-3a", door="engine")
class StopsWithinOnePieceOnly(Detokenizer):
    """A stop string is looked for in the newest piece of text, not across pieces."""

    def _num_held(self, text: str) -> int:
        return 0


@planted("STP-3a", door="engine")
class FirstInTheListWins(Detokenizer):
    """Of several stop strings in one piece the one that was named first cuts it."""

    def _first_match(self, text: str) -> range | None:
        for stop in self._stops:
            if (start := text.find(stop)) >= 0:
                return range(start, start + len(stop))
        return None


@planted("STP-3b", door="engine")
class StopStringStays(Detokenizer):
    """The text keeps the stop string, asked for or not."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, end_token_ids: Collection[int] = ()
    ) -> None:
        super().__init__(tokenizer, params, end_token_ids)
        self._include_stop = True


@planted("STP-3c", door="engine")
class BeginningOfAStopLeaks(Detokenizer):
    """Text that may begin a stop string is delivered at once, and cannot be taken back."""

    @property
    def text(self) -> str:
        return super().text + self._held


@planted("STP-4", door="engine")
class TokensAreDecodedAlone(detokenizer._TokenWindow):
    """Each token is decoded by itself, so half a character becomes U+FFFD."""

    def push(self, token_id: int) -> str:
        return self._decode([token_id])

    def flush(self) -> str:
        return ""


@planted("STP-4", door="engine")
class HeldTextIsLost(Detokenizer):
    """Text that was held back is not released at the end."""

    def finish(self) -> str:
        return ""


FAULTS = plantings_in(globals())
