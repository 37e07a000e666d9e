"""What one decode step runs on the device: each kernel, how often, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm.bench.profiles import WARM_UP_STEPS, never_together
from nanovllm.bench.workload import batch_workload
from nanovllm.llm import LLM

PROFILED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Kernel:
    """Calls and microseconds per step, or whatever was repeated.

    A kernel may be launched while the one before it runs, and wait for it: what counts is the time
    when none that started earlier was running. So the times add up to what the device was busy for.
    """

    name: str
    count: float
    us: float


@dataclass(frozen=True)
class KernelRun:
    """A decode step of equal requests, on average; the longest first.

    On a CPU the kernels are torch's operators.
    """

    batch_size: int
    context_len: int
    kernels: list[Kernel]


def run_kernels(llm: LLM, batch_size: int, prompt_len: int) -> KernelRun:
    """Profiles steps of a full batch after warm-up; ValueError if there is no room for it."""
    llm.reset_prefix_cache()
    num_tokens = WARM_UP_STEPS + 2 * PROFILED_STEPS
    work = batch_workload(0, batch_size, prompt_len, num_tokens, llm.model_config.vocab_size)
    for prompt, params in zip(work.prompts, work.sampling_params(), strict=True):
        llm.add_request(prompt, params)
    decodes = 0
    while decodes < WARM_UP_STEPS:
        if llm.is_finished():
            raise never_together(llm, batch_size)
        decodes += llm.step().num_decode_tokens == batch_size
    kernels = profiled(llm, PROFILED_STEPS, lambda _: llm.step())
    while not llm.is_finished():
        llm.step()
    return KernelRun(batch_size, prompt_len + WARM_UP_STEPS, kernels)


def profiled(llm: LLM, times: int, work: Callable[[int], object]) -> list[Kernel]:
    """What `work(0)`, `work(1)`, ... run, a `times`-th of it; the longest first."""
    on_gpu = llm.model_runner.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as run:
        for i in range(times):
            work(i)
        if on_gpu:
            torch.cuda.synchronize()
    kernels = device_kernels(run, times) if on_gpu else host_operators(run, times)
    return sorted(kernels, key=lambda kernel: -kernel.us)


def host_operators(run: Any, times: int) -> list[Kernel]:
    """Torch's operators, without those that they call."""
    return [
        Kernel(event.key, event.count / times, event.self_cpu_time_total / times)
        for event in run.key_averages()
        if event.self_cpu_time_total
    ]


def device_kernels(run: Any, times: int) -> list[Kernel]:
    """The kernels and copies of a GPU."""
    ran = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in run.events()
        if event.device_type.name == "CUDA"
    ]
    by_name: dict[str, list[float]] = {}
    busy_until = 0.0
    for start, end, name in sorted(ran):
        by_name.setdefault(name, []).append(max(end - max(start, busy_until), 0.0))
        busy_until = max(busy_until, end)
    return [Kernel(name, len(each) / times, sum(each) / times) for name, each in by_name.items()]
