"""`LLM(..., data_parallel_size=n)`: the same calls, answered by n engines."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.data_parallel.actors import RayPool
from nanovllm.data_parallel.dispatcher import Dispatcher
from nanovllm.data_parallel.replica import Task
from nanovllm.data_parallel.router import Router
from nanovllm.engine.interrupts import interrupts_held
from nanovllm.engine.limits import max_output_tokens
from nanovllm.engine.llm_engine import Prompt, check_salt
from nanovllm.llm import LLM, Params, Prompts, as_list
from nanovllm.outputs import RequestOutput, Stats, StepOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import load_tokenizer

PROMPT_TOKENS: Final = 8
"""That take as long as one of the output, since they read the weights together; ten on an H200."""


class DataParallelLLM(LLM):
    """Routes requests to replicas of one model; `LLM(data_parallel_size=n)` makes one if n > 1.

    It has the calls of `LLM` but for `stream`, and gives the tokens of one engine with the same
    options, `seed` included: each request has its seed before it is routed.

    A replica that is lost is reported by a warning and in `losses`. Its requests begin anew on
    another one, once; those that lose that as well end with reason `error`. When none is left,
    all requests end so, and further calls raise RuntimeError.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.config = Config.from_options(model, options)
        self.tokenizer = None
        if not self.config.skip_tokenizer:
            self.tokenizer = load_tokenizer(self.config.model)
        pool = RayPool(self.config)
        # Replicas may differ in memory: what is accepted, each of them can run.
        self._limits = min(
            (info.limits for info in pool.infos), key=lambda limits: limits.num_kvcache_blocks
        )
        self.model_config = pool.infos[0].model_config
        self._dispatcher = Dispatcher(pool, self._make_router())
        self._seeds = random.Random(self.config.seed)
        self._next_id = 0
        self._finished_outputs: dict[int, RequestOutput] = {}  # not handed over yet
        self._claimed: set[int] = set()  # ids that a `generate` waits for
        self._closed = False

    def _make_router(self) -> Router:
        limits = self._limits
        return Router(
            self.config.data_parallel_size,
            block_size=limits.kvcache_block_size,
            capacity=limits.num_kvcache_blocks if limits.enable_prefix_caching else 0,
            max_lead=limits.max_num_batched_tokens,
        )

    @property
    def losses(self) -> dict[int, str]:
        """The cause of the end of each replica that was lost."""
        return dict(self._dispatcher.losses)

    # ---- requests --------------------------------------------------------------------------

    def _max_output_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return max_output_tokens(self._limits, num_prompt_tokens, params.max_tokens)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> int:
        """Route a prompt; returns the request id. See `LLMEngine.add_request`."""
        params = sampling_params or SamplingParams()
        token_ids = self.validate(prompt, params)
        check_salt(cache_salt)
        with interrupts_held():
            return self._dispatch(prompt, token_ids, params, cache_salt)

    def _dispatch(
        self, prompt: Prompt, token_ids: list[int], params: SamplingParams, salt: str | None = None
    ) -> int:
        if params.seed is None:
            # As the scheduler of a single engine does.
            params = replace(params, seed=self._seeds.getrandbits(63))
        text = prompt if isinstance(prompt, str) else None
        cost = params.n * self._max_output_tokens(len(token_ids), params)
        cost += -(-len(token_ids) // PROMPT_TOKENS)
        request_id = self._next_id
        self._next_id += params.n  # the ids that a single engine gives
        self._dispatcher.add(Task(request_id, text, token_ids, params, salt), cost)
        return request_id

    def abort_request(self, request_id: int) -> bool:
        """End a request and all of its samples; False if it is unknown or has ended (SCH-13)."""
        self._check_open()
        return self._abort([request_id])

    def _abort(self, request_ids: Iterable[int]) -> bool:
        live = {request_id for request_id in request_ids if self._dispatcher.abort(request_id)}
        aborted = bool(live)
        while live:
            live.difference_update(output.request_id for output in self._advance_all().outputs)
        return aborted

    def is_finished(self) -> bool:
        """Whether nothing is queued or running, and `step` has no output left to hand over."""
        self._check_open()
        return self._dispatcher.is_finished and self._finished_outputs.keys() <= self._claimed

    # ---- work ------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Wait until a replica has worked for a while; what it did is reported as one step."""
        self._check_open()
        step = self._advance_all()
        ready = [i for i in self._finished_outputs if i not in self._claimed]
        told = replace(step, outputs=tuple(self._finished_outputs[i] for i in ready))
        for i in ready:
            del self._finished_outputs[i]
        return told

    def _advance_all(self) -> StepOutput:
        step = self._dispatcher.advance()
        self._finished_outputs.update((output.request_id, output) for output in step.outputs)
        return step

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete one prompt or many; see `LLM.generate`."""
        self._check_open()
        jobs = self._validate_all(as_list(prompts), sampling_params)
        ids: list[int] = []
        try:
            with interrupts_held():
                for job in jobs:
                    ids.append(self._dispatch(*job))
                    self._claimed.add(ids[-1])
            missing = set(ids)
            with tqdm(total=len(ids), desc="Generating", unit="req", disable=not use_tqdm) as bar:
                while missing:
                    missing.difference_update(o.request_id for o in self._advance_all().outputs)
                    bar.update(len(ids) - len(missing) - bar.n)
            return [self._finished_outputs[request_id] for request_id in ids]
        finally:
            if not self._closed:
                self._abort(ids)
            for request_id in ids:
                self._finished_outputs.pop(request_id, None)
            self._claimed.difference_update(ids)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> NoReturn:
        """Raises ValueError: replicas report requests that have ended."""
        raise ValueError(
            f"a stream needs a single engine, data_parallel_size={self.config.data_parallel_size}; "
            "use generate, or add_request and step"
        )

    # ---- the replicas ----------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests are not affected (API-8)."""
        self._check_open()
        self._dispatcher.ask_all("reset_prefix_cache")
        self._dispatcher.router.forget()

    def stats(self) -> Stats:
        """Sums over the replicas that are left (API-8)."""
        replicas = self.replica_stats()
        total = Stats(*(sum(getattr(s, f.name) for s in replicas) for f in fields(Stats)))
        waiting = total.num_waiting + self._dispatcher.num_undelivered
        return replace(total, num_waiting=waiting)

    def replica_stats(self) -> list[Stats]:
        """Of each replica that is left, in order."""
        self._check_open()
        return list(self._dispatcher.ask_all("stats").values())

    def close(self) -> None:
        """End all replicas; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._dispatcher.pool.close()

    exit = close

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed")
        # What it still has, a last step hands over.
        if self._dispatcher.is_dead and self._dispatcher.is_finished and not self._finished_outputs:
            causes = "; ".join(f"replica {i}: {cause}" for i, cause in self.losses.items())
            raise RuntimeError(f"this engine has failed, no replica is left: {causes}")
