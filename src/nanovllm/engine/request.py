"""A request as its caller sees it: its samples, their text so far, the output at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.sequence import FinishReason, Sequence
from nanovllm.outputs import RequestOutput, SampleOutput, TokenLogprob


@dataclass(slots=True)
class Sample:
    """One sequence with its text; `detokenizer` is None if the engine has no tokenizer."""

    seq: Sequence
    detokenizer: Detokenizer | None
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text that no later token can change (STP-3c, STP-4)."""
        return self.detokenizer.text if self.detokenizer else ""

    def push(self, token_id: int) -> bool:
        """Take the next token; whether it completes a stop string."""
        if self.detokenizer is None:
            return False
        self.detokenizer.push(token_id)
        return self.detokenizer.stopped

    def finish(self) -> None:
        """Release text that was held back; a tokenizer that fails is this sample's error only."""
        if self.detokenizer is None:
            return
        try:
            self.detokenizer.finish()
        except Exception as error:
            self.seq.finish_reason = FinishReason.ERROR
            self.seq.error = f"{type(error).__name__}: {error}"

    def output(self) -> SampleOutput:
        assert self.seq.finish_reason is not None
        return SampleOutput(
            text=self.text,
            token_ids=self.seq.completion_token_ids,
            finish_reason=self.seq.finish_reason.value,
            error=self.seq.error,
            logprobs=self.logprobs if self.seq.params.logprobs is not None else None,
        )


@dataclass(slots=True)
class Request:
    """`samples` in order; `claimed` if a `generate` or `stream` call waits for it, so that `step`
    does not hand its output to somebody else (API-4); `begun` if it has a token."""

    prompt: str | None
    samples: tuple[Sample, ...]
    claimed: bool = False
    begun: bool = False

    @property
    def request_id(self) -> int:
        return self.samples[0].seq.seq_id

    @property
    def is_finished(self) -> bool:
        return all(sample.seq.is_finished for sample in self.samples)

    def sample(self, seq_id: int) -> Sample:
        """The sample of one of its sequences, whose ids follow one another."""
        return self.samples[seq_id - self.request_id]

    def output(self) -> RequestOutput:
        first = self.samples[0].seq
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt_token_ids,
            num_cached_tokens=first.num_cached_tokens or 0,
            samples=tuple(sample.output() for sample in self.samples),
        )
