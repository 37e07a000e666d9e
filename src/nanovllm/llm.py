"""The public class: whole jobs on top of the engine's steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from jinja2 import TemplateError
from tqdm.auto import tqdm

from nanovllm.engine.interrupts import interrupts_held
from nanovllm.engine.llm_engine import LLMEngine, Prompt
from nanovllm.engine.request import Request, Sample
from nanovllm.outputs import RequestOutput, StreamChunk
from nanovllm.sampling_params import SamplingParams

Prompts = Prompt | Sequence[Prompt]
Message = dict[str, str]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(LLMEngine):
    """Offline generation, chat and streaming; see `LLMEngine` for its arguments.

    >>> from nanovllm import LLM, SamplingParams
    >>> with LLM() as llm:
    ...     outputs = llm.generate("In the beginning", SamplingParams(temperature=0))

    `LLM(..., data_parallel_size=n)` is a `DataParallelLLM` if n > 1, as a `Path` is a `PosixPath`.
    """

    def __new__(cls, model: str | Path | None = None, **options: Any) -> Self:
        if cls is LLM and options.get("data_parallel_size", 1) != 1:
            from nanovllm.data_parallel.llm import DataParallelLLM

            return super().__new__(DataParallelLLM)  # type: ignore[return-value]
        return super().__new__(cls)

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete one prompt or many, each text or token ids; results in input order (API-1..2).

        All prompts are validated first; if any is bad, a ValueError names every bad index and
        nothing is added (API-6). Requests that others added run along, and stay theirs (API-4).
        """
        with self._claim(as_list(prompts), sampling_params) as requests:
            with _Progress(requests, self, disable=not use_tqdm) as progress:
                for request in requests:
                    while not request.is_finished:
                        progress.step()
            return [request.output() for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of `{"role": ..., "content": ...}`."""
        if isinstance(messages, Mapping):
            raise TypeError("a conversation is a list of messages, got a single mapping")
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        prompts = [self.apply_chat_template(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that the model is to answer next; ValueError for one that
        the model's chat template cannot render, TypeError for messages that are none."""
        for message in messages:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise TypeError(
                    f"a message needs a role and a content, both strings, got {message!r}"
                )
        tokenizer = self._require_tokenizer("a chat")
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self, prompts: Prompts, sampling_params: Params = None
    ) -> Generator[StreamChunk, None, None]:
        """Complete prompts piece by piece, as they are generated.

        A sample's pieces concatenate to its final text, and its last piece has the finish reason.
        Closing the iterator aborts what is not finished. Prompts are validated at once.
        """
        prompt_list = as_list(prompts)
        self._validate_all(prompt_list, sampling_params)
        return self._stream(prompt_list, sampling_params)

    def _stream(
        self, prompts: list[Prompt], sampling_params: Params
    ) -> Generator[StreamChunk, None, None]:
        with self._claim(prompts, sampling_params) as requests:
            tails = [
                _Tail(i, j, sample)
                for i, request in enumerate(requests)
                for j, sample in enumerate(request.samples)
            ]
            while tails:
                self._check_open()
                self._steps.advance()
                for tail in tails:
                    yield from tail.take()
                tails = [tail for tail in tails if not tail.done]

    def _validate_all(
        self, prompts: list[Prompt], sampling_params: Params
    ) -> list[tuple[Prompt, list[int], SamplingParams]]:
        """Prompt, token ids and parameters of each; one ValueError for all that is wrong."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling_params")
        jobs, problems = [], []
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                jobs.append((prompt, self.validate(prompt, param), param))
            except (ValueError, TypeError) as error:
                problems.append(f"prompt {i}: {error}")
        if problems:
            raise ValueError("nothing was added:\n  " + "\n  ".join(problems))
        return jobs

    @contextmanager
    def _claim(self, prompts: list[Prompt], sampling_params: Params) -> Iterator[list[Request]]:
        """Add requests that are this caller's alone, and leave none behind, however it ends."""
        self._check_open()
        jobs = self._validate_all(prompts, sampling_params)
        requests: list[Request] = []
        try:
            with interrupts_held():
                for prompt, token_ids, params in jobs:
                    text = prompt if isinstance(prompt, str) else None
                    requests.append(self._enqueue(text, token_ids, params, None))
                    requests[-1].claimed = True
            yield requests
        finally:
            if not self._closed:
                with interrupts_held():
                    self._steps.land_all()
                    for request in requests:
                        if not request.is_finished:
                            self.abort_request(request.request_id)
                        self._requests.finished.pop(request.request_id, None)


class _Tail:
    """What of one sample has not been streamed yet."""

    def __init__(self, prompt_index: int, sample_index: int, sample: Sample) -> None:
        self.index = (prompt_index, sample_index)
        self.sample = sample
        self.num_chars = 0
        self.num_tokens = 0
        self.done = False

    def take(self) -> Iterator[StreamChunk]:
        seq, text = self.sample.seq, self.sample.text
        self.done = seq.is_finished
        if len(text) == self.num_chars and not self.done and self.sample.detokenizer:
            return
        token_ids = seq.token_ids[seq.num_prompt_tokens + self.num_tokens :]
        if token_ids or self.done:
            yield StreamChunk(
                *self.index,
                text[self.num_chars :],
                token_ids,
                seq.finish_reason.value if seq.finish_reason else None,
                seq.error,
            )
        self.num_chars = len(text)
        self.num_tokens += len(token_ids)


class _Progress:
    """A bar over requests, with tokens/s of prefill and decode and the share of prefix hits."""

    def __init__(self, requests: list[Request], engine: LLM, disable: bool) -> None:
        self.requests = requests
        self.engine = engine
        self.bar = tqdm(total=len(requests), desc="Generating", unit="req", disable=disable)
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.__exit__(*exc)

    def step(self) -> None:
        """One step of the engine, shown if the bar is."""
        self.engine._check_open()
        begin = perf_counter()
        step = self.engine._steps.advance()
        if self.bar.disable:
            return
        # A mixed step counts as prefill: the chunk is what takes its time.
        phase = "decode" if step.kind.value == "decode" else "prefill"
        self.seconds[phase] += perf_counter() - begin
        self.tokens[phase] += step.num_tokens
        self.bar.set_postfix_str(
            f"prefill {self._rate('prefill')} tok/s, decode {self._rate('decode')} tok/s, "
            f"prefix hits {self.engine.stats().prefix_hit_share:.0%}",
            refresh=False,
        )
        self.bar.update(sum(request.is_finished for request in self.requests) - self.bar.n)

    def _rate(self, phase: str) -> int:
        return round(self.tokens[phase] / self.seconds[phase]) if self.tokens[phase] else 0


def as_list(prompts: Prompts) -> list[Prompt]:
    """A text or one list of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be text, token ids, or a list of these, got {type(prompts).__name__}"
        )
    items: list[Any] = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return [items] if items and isinstance(items[0], Integral) else items
