"""What a caller gets back: finished requests, stream pieces, steps, statistics (API-2, API-5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

TokenLogprob = tuple[int, float]


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One sample of a request.

    Attributes:
        text: decoded output, cut at a stop string; empty without a tokenizer.
        token_ids: every generated token, an eos or those of a stop string included (SCH-12c).
        finish_reason: `stop`, `length`, `abort` or `error`.
        error: the cause if the reason is `error`.
        logprobs: per token, `(token_id, log probability)` of the token itself and then of the
            most probable others; None unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    error: str | None = None
    logprobs: list[list[TokenLogprob]] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. `output["text"]` and `output["token_ids"]` read sample 0, as nano-vllm's
    outputs do (API-7).

    Attributes:
        prompt: the text, or None if token ids were given.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        samples: `SamplingParams.n` of them, in order (FRK-3).
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    samples: tuple[SampleOutput, ...]

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.samples[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.samples[0].error

    @property
    def logprobs(self) -> list[list[TokenLogprob]] | None:
        return self.samples[0].logprobs

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def __getitem__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self, name):
            raise KeyError(name)
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A piece of a stream: text that is final, and the tokens generated since the last piece.

    `prompt_index` and `sample_index` say whose it is. The last piece of a sample has a
    `finish_reason`, and `error` if that is `error`.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step did.

    It also unpacks into nano-vllm's `outputs, num_tokens`: pairs of request id and token ids, and
    a count that is positive for prefilled tokens, negative for decoded sequences (API-7).

    Attributes:
        kind: `prefill`, `decode`, `mixed` or `idle`.
        num_rows: sequences that computed something.
        num_prefill_tokens, num_decode_tokens: positions computed.
        num_preempted: sequences that lost their blocks.
        outputs: requests that finished.
        num_context_tokens: sum over the rows of the positions that each attends to.
        device_seconds: time that the device was busy with the step; 0 if that is not measured.
        first_tokens: ids of requests whose first token came since the last call, but of those that
            a `generate` or `stream` waits for.
    """

    kind: str
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int
    outputs: tuple[RequestOutput, ...]
    num_context_tokens: int = 0
    device_seconds: float = 0.0
    first_tokens: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    def __iter__(self) -> Iterator[Any]:
        yield [(output.request_id, output.token_ids) for output in self.outputs]
        yield self.num_tokens if self.num_prefill_tokens else -self.num_decode_tokens


@dataclass(frozen=True, slots=True)
class Stats:
    """State of the engine now, and totals since it was made.

    `num_cached_tokens` of `num_lookup_tokens` prompt tokens were found in the prefix cache; a
    request counts once, at its first admission (PFX-17).
    """

    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_requests: int
    num_steps: int
    num_computed_tokens: int
    num_preemptions: int
    num_lookup_tokens: int
    num_cached_tokens: int

    @property
    def prefix_hit_share(self) -> float:
        return self.num_cached_tokens / max(self.num_lookup_tokens, 1)

    def as_dict(self) -> dict[str, int | float]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"prefix_hit_share": self.prefix_hit_share}
