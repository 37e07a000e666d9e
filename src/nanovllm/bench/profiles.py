"""Three questions to one engine: how many tokens a second, how fast a step, how long a wait."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from nanovllm.bench.recorder import Recorder, StepRecord, percentile
from nanovllm.bench.roofline import DeviceRates, ModelCosts, floor_seconds
from nanovllm.bench.workload import (
    Workload,
    batch_workload,
    offline_workload,
    poisson_arrivals,
)
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput

LATENCY_PROMPT_LEN = 512
LATENCY_STEPS = 128
WARM_UP_STEPS = 16
WARM_UP_SEED, WARM_UP_REQUESTS, WARM_UP_TOKENS = 1_000_000, 16, 4


@dataclass(frozen=True)
class ThroughputRun:
    """All requests at once.

    Attributes:
        floor_seconds: what its steps need at least by the roofline; None if that was not measured.
    """

    seed: int
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    floor_seconds: float | None = None
    records: list[StepRecord] = field(default_factory=list, repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens only, as nano-vllm counts."""
        return self.num_output_tokens / self.seconds

    @property
    def exposed_seconds(self) -> float:
        """In which the device waited for the host."""
        return max(self.seconds - sum(record.device_seconds for record in self.records), 0.0)

    @property
    def roofline_share(self) -> float | None:
        return None if self.floor_seconds is None else self.floor_seconds / self.seconds


@dataclass(frozen=True)
class LatencyRun:
    """Equal requests that decode together; `step_ms` of each decode step after warm-up.

    Attributes:
        floor_seconds: what these steps need at least by the roofline; None if not measured.
    """

    batch_size: int
    step_ms: list[float] = field(repr=False)
    floor_seconds: float | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def roofline_share(self) -> float | None:
        return None if self.floor_seconds is None else 1e3 * self.floor_seconds / sum(self.step_ms)


@dataclass(frozen=True)
class OnlineRun:
    """Requests that arrive by themselves; times of each that finished, in seconds.

    Attributes:
        ttft: from arrival to the first token.
        tpot: between two later tokens of one request, on average; of requests with two or more.
    """

    policy: str
    seed: int
    rate: float
    seconds: float
    num_requests: int
    num_output_tokens: int
    ttft: list[float] = field(repr=False)
    tpot: list[float] = field(repr=False)
    records: list[StepRecord] = field(default_factory=list, repr=False)

    def milliseconds(self) -> dict[str, float]:
        """Percentiles by name."""
        return {
            f"{name}_p{share:.0%}".rstrip("%"): 1e3 * percentile(values, share)
            for name, values in (("ttft", self.ttft), ("tpot", self.tpot))
            for share in (0.5, 0.99)
            if values
        }


def warm_up(llm: LLM, max_len: int) -> None:
    """Compile what compiles on first use, and leave an empty prefix cache."""
    vocab_size = llm.model_config.vocab_size
    work = offline_workload(WARM_UP_SEED, WARM_UP_REQUESTS, max_len, vocab_size)
    params = [replace(p, max_tokens=WARM_UP_TOKENS) for p in work.sampling_params()]
    llm.generate(list(work.prompts), params, use_tqdm=False)
    llm.reset_prefix_cache()


def run_throughput(
    llm: LLM, workload: Workload, seed: int, rates: DeviceRates | None = None
) -> ThroughputRun:
    """The whole workload, from a cold prefix cache."""
    llm.reset_prefix_cache()
    sampling_params = workload.sampling_params()
    recorder = Recorder(llm)
    for prompt, params in zip(workload.prompts, sampling_params, strict=True):
        llm.add_request(prompt, params)
    outputs = [output for step in recorder.run() for output in step.outputs]
    seconds = recorder.now
    _check_complete(outputs, workload)
    records = recorder.records
    return ThroughputRun(
        seed=seed,
        seconds=seconds,
        num_prompt_tokens=workload.num_prompt_tokens,
        num_output_tokens=workload.num_output_tokens,
        num_preemptions=sum(record.num_preempted for record in records),
        floor_seconds=floor_seconds(records, ModelCosts.of(llm), rates) if rates else None,
        records=records,
    )


def run_latency(
    llm: LLM,
    batch_size: int,
    prompt_len: int = LATENCY_PROMPT_LEN,
    steps: int = LATENCY_STEPS,
    rates: DeviceRates | None = None,
    **sampling: Any,
) -> LatencyRun:
    """Decode steps of a full batch, each from the end of the one before it.

    `sampling` are parameters of `SamplingParams` beside those of the workload. ValueError if the
    engine has no room for such a batch.
    """
    llm.reset_prefix_cache()
    vocab_size = llm.model_config.vocab_size
    work = batch_workload(0, batch_size, prompt_len, WARM_UP_STEPS + steps + 1, vocab_size)
    recorder = Recorder(llm)
    for prompt, params in zip(work.prompts, work.sampling_params(**sampling), strict=True):
        llm.add_request(prompt, params)
    outputs = [output for step in recorder.run() for output in step.outputs]
    _check_complete(outputs, work)
    full = [r for r in recorder.records if r.num_decode_tokens == r.num_rows == batch_size]
    timed = full[WARM_UP_STEPS - 1 :]
    if len(timed) < 2:
        raise never_together(llm, batch_size)
    step_ms = [1e3 * (step.end - before.end) for before, step in pairwise(timed)]
    floor = floor_seconds(timed[1:], ModelCosts.of(llm), rates) if rates else None
    return LatencyRun(batch_size, step_ms, floor)


def run_online(llm: LLM, workload: Workload, seed: int, rate: float) -> OnlineRun:
    """Requests added when they arrive, at `rate` a second, whether or not the engine keeps up."""
    llm.reset_prefix_cache()
    requests = list(zip(workload.prompts, workload.sampling_params(), strict=True))
    due = poisson_arrivals(seed, rate, len(requests))
    recorder = Recorder(llm)
    arrival: dict[int, float] = {}
    first: dict[int, float] = {}
    end: dict[int, tuple[float, int]] = {}
    outputs: list[RequestOutput] = []
    while len(end) < len(requests):
        while len(arrival) < len(due) and due[len(arrival)] <= recorder.now:
            index = len(arrival)
            arrival[llm.add_request(*requests[index])] = due[index]
        if llm.is_finished():
            time.sleep(max(due[len(arrival)] - recorder.now, 0.0))
            continue
        step = recorder.step()
        first.update(dict.fromkeys(step.first_tokens, recorder.now))
        end.update((o.request_id, (recorder.now, o.num_completion_tokens)) for o in step.outputs)
        outputs += step.outputs
    _check_complete(outputs, workload)
    return OnlineRun(
        policy=llm.config.scheduling_policy,
        seed=seed,
        rate=rate,
        seconds=recorder.now,
        num_requests=len(requests),
        num_output_tokens=workload.num_output_tokens,
        ttft=[first[i] - arrival[i] for i in arrival],
        tpot=[(at - first[i]) / (count - 1) for i, (at, count) in end.items() if count > 1],
        records=recorder.records,
    )


def never_together(llm: LLM, batch_size: int) -> ValueError:
    """The error of a batch that did not decode together for long enough."""
    return ValueError(
        f"{batch_size} requests never decode together here: max_num_seqs="
        f"{llm.config.max_num_seqs}, {llm.stats().num_blocks} KV blocks, "
        f"max_num_batched_tokens={llm.config.max_num_batched_tokens}"
    )


def _check_complete(outputs: list[RequestOutput], workload: Workload) -> None:
    """A figure of a run that lost something is none."""
    failed = [output for output in outputs if output.finish_reason != "length"]
    if failed:
        raise RuntimeError(f"request {failed[0].request_id} ended early: {failed[0].error}")
    found = sum(output.num_completion_tokens for output in outputs)
    if found != workload.num_output_tokens:
        raise RuntimeError(f"{found} tokens generated, {workload.num_output_tokens} asked for")
