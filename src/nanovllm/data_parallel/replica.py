"""The other end: an engine that works for a while when told to, and says what it did."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final

from nanovllm.config import SchedulerConfig
from nanovllm.llm import LLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import Stats, StepOutput
from nanovllm.sampling_params import SamplingParams

PERIOD: Final = 0.1
"""Seconds of work per call: long beside the call itself, short beside a request."""


@dataclass(frozen=True, slots=True)
class Task:
    """A request on its way to a replica. It has a seed, so it may run anywhere, and again."""

    request_id: int
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica turned out to be when it had started."""

    pid: int
    limits: SchedulerConfig
    model_config: ModelConfig


class Replica:
    """One engine; `period` is the time that `work` takes if there is enough to do."""

    def __init__(self, period: float = PERIOD) -> None:
        self.period = period
        self._tasks: dict[int, Task] = {}  # by the engine's request id

    def start(self, model: str | Path, options: dict[str, Any]) -> ReplicaInfo:
        """Make the engine; raises what `LLM` raises."""
        self.llm = LLM(model, **options)
        return ReplicaInfo(os.getpid(), self.llm.scheduler.config, self.llm.model_config)

    def work(self, tasks: list[Task], aborted: Iterable[int]) -> StepOutput:
        """Take tasks and aborts, and step until nothing is left or the period is over.

        Returns the sum of the steps, with the front's request ids. Raises RuntimeError if the
        engine has failed for good, so that its requests can be tried elsewhere.
        """
        begin = monotonic()
        for task in tasks:
            request_id = self.llm.add_request(
                task.token_ids, task.params, cache_salt=task.cache_salt
            )
            self._tasks[request_id] = task
        unwanted = set(aborted)
        for request_id, task in self._tasks.items():
            if task.request_id in unwanted:
                self.llm.abort_request(request_id)
        steps: list[StepOutput] = []
        while not self.llm.is_finished():
            steps.append(self._step())
            if monotonic() - begin >= self.period:
                break
        return merge(steps)

    def _step(self) -> StepOutput:
        step = self.llm.step()
        fault = self.llm.model_runner.fault
        if fault is not None:
            raise RuntimeError(fault)
        first = [self._tasks[i].request_id for i in step.first_tokens if i in self._tasks]
        tasks = [self._tasks.pop(output.request_id) for output in step.outputs]
        outputs = (
            replace(output, request_id=task.request_id, prompt=task.prompt)
            for output, task in zip(step.outputs, tasks, strict=True)
        )
        return replace(step, outputs=tuple(outputs), first_tokens=tuple(first))

    def stats(self) -> Stats:
        return self.llm.stats()

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()


def merge(steps: list[StepOutput]) -> StepOutput:
    """Several steps as one: counts are sums."""
    num_prefill = sum(step.num_prefill_tokens for step in steps)
    num_decode = sum(step.num_decode_tokens for step in steps)
    kinds = {(True, True): "mixed", (True, False): "prefill", (False, True): "decode"}
    return StepOutput(
        kind=kinds.get((num_prefill > 0, num_decode > 0), "idle"),
        num_rows=sum(step.num_rows for step in steps),
        num_prefill_tokens=num_prefill,
        num_decode_tokens=num_decode,
        num_preempted=sum(step.num_preempted for step in steps),
        outputs=tuple(output for step in steps for output in step.outputs),
        num_context_tokens=sum(step.num_context_tokens for step in steps),
        device_seconds=sum(step.device_seconds for step in steps),
        first_tokens=tuple(request_id for step in steps for request_id in step.first_tokens),
    )
