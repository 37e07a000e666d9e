"""The least time that a run's own steps can take on this device, from rates measured beside it.

A step reads every weight once and the keys and values of all positions that its rows attend to, and
multiplies each token with each weight. Its floor is the longer of the two at the rates of a large
copy and a large matrix product, which little on the device exceeds: reading alone may be a few
percent faster than a copy, which also writes. The floor of a run is the sum over the steps it
really did, so it holds for small pools that preempt, chunks, and any workload. Left out, and
therefore to the run's disadvantage: activations, sampling, the products of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import torch

from nanovllm.bench.recorder import StepRecord
from nanovllm.llm import LLM

MAX_COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 1 << 26
MATMUL_SIZE = 8192
CPU_MATMUL_SIZE = 512
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """`copy`: bytes a second, read and written; `matmul`: floating-point operations a second."""

    copy: float
    matmul: float


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a step costs one rank at least.

    Attributes:
        weight_bytes: read by every step.
        kv_bytes: of one position, keys and values of all layers.
        token_flops: of one computed position, without attention.
        head_flops: of one row's logits.
    """

    weight_bytes: int
    kv_bytes: int
    token_flops: int
    head_flops: int

    @classmethod
    def of(cls, llm: LLM) -> ModelCosts:
        """Those of an engine's model. An embedding table is read only if it is the head too."""
        runner = llm.model_runner
        table = runner.model.lm_head.weight.numel()
        num_all = sum(p.numel() for p in runner.model.parameters())
        num_read = num_all if llm.model_config.tie_word_embeddings else num_all - table
        return cls(
            weight_bytes=num_read * runner.dtype.itemsize,
            kv_bytes=runner.block_bytes // runner.block_size,
            token_flops=2 * (num_read - table),
            head_flops=2 * table,
        )


def step_floor(record: StepRecord, costs: ModelCosts, rates: DeviceRates) -> float:
    """Seconds; ValueError if the engine does not tell what the step attended to."""
    if record.num_context_tokens < record.num_rows:
        raise ValueError("the engine's steps have no num_context_tokens, which the roofline needs")
    num_tokens = record.num_prefill_tokens + record.num_decode_tokens
    moved = costs.weight_bytes + costs.kv_bytes * record.num_context_tokens
    # Of the prefilled rows only the last chunk has logits; at least the decodes have them.
    flops = costs.token_flops * num_tokens + costs.head_flops * record.num_decode_tokens
    return max(moved / rates.copy, flops / rates.matmul)


def floor_seconds(records: Iterable[StepRecord], costs: ModelCosts, rates: DeviceRates) -> float:
    """Sum over the steps of a run."""
    return sum(step_floor(record, costs, rates) for record in records)


def measure_rates(
    device: torch.device,
    dtype: torch.dtype,
    copy_bytes: int | None = None,
    matmul_size: int | None = None,
) -> DeviceRates:
    """The best of a few rounds each; sizes that are not given suit the device."""
    on_gpu = device.type == "cuda"
    copy_bytes = copy_bytes or (_copy_bytes(device) if on_gpu else CPU_COPY_BYTES)
    matmul_size = matmul_size or (MATMUL_SIZE if on_gpu else CPU_MATMUL_SIZE)
    source, target = torch.empty(2, copy_bytes, dtype=torch.uint8, device=device)
    copying = _best_seconds(lambda: target.copy_(source), device)
    a, b = torch.randn(2, matmul_size, matmul_size, device=device).to(dtype)
    multiplying = _best_seconds(lambda: a @ b, device)
    return DeviceRates(copy=2 * copy_bytes / copying, matmul=2 * matmul_size**3 / multiplying)


def _copy_bytes(device: torch.device) -> int:
    """As much as is far more than any cache, but leaves room beside a KV cache."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(MAX_COPY_BYTES, free // 4)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call; calls are queued together, so that launching costs nothing."""
    work()
    if device.type != "cuda":
        return min(_wall_seconds(work) for _ in range(ROUNDS))
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(ROUNDS):
            work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / ROUNDS)
    return best


def _wall_seconds(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin
