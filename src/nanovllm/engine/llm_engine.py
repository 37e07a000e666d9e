"""The engine: requests in, one step at a time, finished requests out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nanovllm.config import Config, SchedulerConfig
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.interrupts import interrupts_held
from nanovllm.engine.pipeline import StepPipeline
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.request_table import RequestTable
from nanovllm.engine.runners import make_runner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.trace_log import TracedScheduler, TraceLog
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import Stats, StepOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Seq[int]


class LLMEngine:
    """Scheduler, model runner and tokenizer put together; not thread-safe.

    Args:
        model: directory of a Hugging Face checkpoint; the embedded model if None.
        options: fields of `Config`; TypeError for others (API-3).

    Use it as a context manager or call `close`; afterwards every call raises RuntimeError.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        config = Config.from_options(model, options)
        model_config = ModelConfig.from_pretrained(config.model)
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer:
            self.tokenizer = load_tokenizer(config.model)
            # STP-1: whatever any file of the checkpoint calls an end of sequence is one.
            eos = self.tokenizer.eos_token_id
            if eos is not None:
                model_config = replace(
                    model_config, eos_token_ids=model_config.eos_token_ids | {eos}
                )
        self.config = config
        self.model_config = model_config
        self.model_runner = make_runner(config, model_config)
        self.scheduler = self._make_scheduler()
        self._requests = RequestTable(self.scheduler)
        self._steps = StepPipeline(self.scheduler, self.model_runner, self._requests)
        self._closed = False

    def _make_scheduler(self) -> Scheduler:
        config = SchedulerConfig(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.model_runner.max_model_len,
            num_kvcache_blocks=self.model_runner.num_blocks,
            kvcache_block_size=self.model_runner.block_size,
            eos_token_ids=self.model_config.eos_token_ids,
            policy=self.config.scheduling_policy,
            max_consecutive_prefills=self.config.max_consecutive_prefills,
            enable_prefix_caching=self.config.enable_prefix_caching,
            max_steps_in_flight=1 + self.model_runner.steps_ahead,
            seed=self.config.seed,
        )
        if self.config.trace is None:
            return Scheduler(config)
        return TracedScheduler(config, TraceLog(self.config.trace))

    # ---- requests --------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ValueError for ids outside the vocabulary (SCH-7c)."""
        if isinstance(prompt, str):
            _check_unicode("the prompt", prompt)
            return self._require_tokenizer("a prompt of text").encode(prompt)
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise TypeError(f"a prompt is text or token ids, got {type(prompt).__name__}")
        token_ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        kinds = set(map(type, token_ids))  # a prompt is long, and of one kind
        for kind in kinds:
            if kind is bool or not issubclass(kind, Integral):
                wrong = next(t for t in token_ids if type(t) is kind)
                raise TypeError(f"token ids must be integers, got {wrong!r}")
        if kinds != {int}:
            token_ids = [int(token_id) for token_id in token_ids]
        self._check_vocabulary("token ids", token_ids)
        return token_ids

    def _check_vocabulary(self, what: str, token_ids: Collection[int]) -> None:
        vocab_size = self.model_config.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
            raise ValueError(f"{what} {outside[:5]} are outside the vocabulary of {vocab_size}")

    def validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of the prompt if the request can run; ValueError or TypeError if not."""
        self._check_open()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {params!r}")
        if params.stop:
            self._require_tokenizer("a stop string")
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        token_ids = self.encode(prompt)
        self._max_output_tokens(len(token_ids), params)
        return token_ids

    def _max_output_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return self.scheduler.validate(num_prompt_tokens, params)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> int:
        """Queue a prompt; returns the request id. Requests of different salts share no KV (PFX-14).

        Raises ValueError or TypeError if it can never run, and then changes nothing (SCH-7).
        """
        params = sampling_params or SamplingParams()
        token_ids = self.validate(prompt, params)
        check_salt(cache_salt)
        text = prompt if isinstance(prompt, str) else None
        with interrupts_held():
            return self._enqueue(text, token_ids, params, cache_salt).request_id

    def _enqueue(
        self, text: str | None, token_ids: list[int], params: SamplingParams, salt: str | None
    ) -> Request:
        seqs = self.scheduler.add(token_ids, params, salt=salt)
        request = Request(text, tuple(Sample(seq, self._detokenizer(seq.params)) for seq in seqs))
        self._requests.add(request)
        return request

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        end_token_ids = params.end_token_ids(self.model_config.eos_token_ids)
        return Detokenizer(self.tokenizer, params, end_token_ids)

    @interrupts_held()
    def abort_request(self, request_id: int) -> bool:
        """End a request and all of its samples; False if it is unknown or has ended (SCH-13)."""
        self._check_open()
        self._steps.land_all()
        return self._requests.abort(request_id)

    def is_finished(self) -> bool:
        """Whether nothing is queued or running, and `step` has no output left to hand over."""
        self._check_open()
        waiting = self._requests.finished.values()
        return self.scheduler.is_finished() and all(request.claimed for request in waiting)

    # ---- steps -----------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Execute a step to its end; idle if there is nothing to do.

        A step that raises ends its requests with reason `error`; the others go on (SCH-15). If none
        can run after it, all end, and further calls raise RuntimeError (TP-4).
        """
        self._check_open()
        step = self._steps.advance()
        num_decode = sum(row.is_decode for row in step.rows)
        output = StepOutput(
            kind=step.kind.value,
            num_rows=len(step.rows),
            num_prefill_tokens=step.num_tokens - num_decode,
            num_decode_tokens=num_decode,
            num_preempted=len(step.preempted),
            outputs=self._requests.ready(),
            num_context_tokens=sum(row.end for row in step.rows),
            device_seconds=self._steps.device_seconds if step.rows else 0.0,
            first_tokens=tuple(self._requests.begun),
        )
        try:
            return output
        finally:  # the last that is done: what an interrupt keeps from the caller is told again
            self._requests.told()

    # ---- the engine as a whole -------------------------------------------------------------

    @interrupts_held()
    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests are not affected (API-8)."""
        self._check_open()
        self._steps.land_all()
        self.scheduler.reset_prefix_cache()

    def stats(self) -> Stats:
        """Queues, blocks and totals (API-8)."""
        self._check_open()
        blocks = self.scheduler.block_manager
        return Stats(
            num_waiting=self.scheduler.num_waiting,
            num_running=len(self.scheduler.running),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_published_blocks,
            **asdict(self.scheduler.stats),
        )

    def close(self) -> None:
        """Give up the model and the KV cache; twice is harmless."""
        if not self._closed:
            self.model_runner.close()
        self._closed = True
        for name in ("model_runner", "scheduler", "_steps"):
            self.__dict__.pop(name, None)

    exit = close

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed")
        fault = self.model_runner.fault
        # What it still has, a last step ends or hands over.
        if fault is not None and self._requests.is_empty:
            raise RuntimeError(f"this engine has failed: {fault}")

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer; this engine was made with skip_tokenizer")
        return self.tokenizer


def check_salt(cache_salt: object) -> None:
    """Raises TypeError or ValueError for a salt that is neither None nor Unicode text."""
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str):
        raise TypeError(f"cache_salt must be a string, got {cache_salt!r}")
    _check_unicode("cache_salt", cache_salt)


def _check_unicode(what: str, text: str) -> None:
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{what} holds a lone surrogate, which is no Unicode text")
