"""Engine options, validated once and frozen (CFG-1..3)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny-qwen3"

Policy = Literal["prefill_first", "mixed"]


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_share(name: str, value: object, high: float) -> None:
    """A real number in (0, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value <= high:
        raise ValueError(f"{name} must be in (0, {high}], got {value}")


def _check_seed(value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"seed must be None or an int, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler needs to know; all resolved, nothing left to default.

    Args:
        max_num_seqs: sequences that run at once (SCH-3).
        max_num_batched_tokens: tokens computed per step (SCH-2).
        max_model_len: prompt and output tokens of a request, together.
        num_kvcache_blocks, kvcache_block_size: the pool, `N` blocks of `bs` token slots.
        eos_token_ids: ids that end a request unless it ignores them.
        policy: `prefill_first` computes prompts in steps of their own, `mixed` fills what decodes
            leave of the budget, so that a long prompt does not stall the streams.
        max_consecutive_prefills: prefill-only steps in a row while a decode waits (SCH-1). Hence a
            running request advances in one of `max_consecutive_prefills + 1` steps (SCH-6).
        max_steps_in_flight: steps that may be planned before the first of them is committed.
        seed: of the seeds that requests without one are given; None draws it from the system.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_kvcache_blocks: int
    kvcache_block_size: int
    eos_token_ids: frozenset[int] = frozenset()
    policy: Policy = "prefill_first"
    max_consecutive_prefills: int = 8
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_steps_in_flight",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_kvcache_blocks",
            "kvcache_block_size",
            "max_consecutive_prefills",
        ):
            _check_positive(name, getattr(self, name))
        _check_choice("policy", self.policy, get_args(Policy))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: a decode step could not serve every sequence"
            )


@dataclass(frozen=True, slots=True)
class Config:
    """Options of `LLM`; every keyword of `LLM(model, ...)` is a field here.

    Args:
        model: directory of a Hugging Face checkpoint; the embedded model if not given.
        max_num_batched_tokens: tokens computed per step.
        max_num_seqs: sequences that run at once.
        max_model_len: prompt and output tokens of a request; None is the model's own limit.
        kvcache_block_size: token slots per KV block. None takes the attention backend's choice, 16
            for `torch` and `triton`: a request wastes at most 15 slots and prefixes are shared in
            steps of 16 tokens, while tables stay short (CFG-3); 256 for `flash_attn`, its minimum.
        num_kvcache_blocks: blocks of the pool; None sizes it from the memory budget.
        kvcache_memory_gb: budget of the pool, in GiB, if `num_kvcache_blocks` is None. None is 1
            GiB with the `torch` backend, and with the others what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: this engine's share of a GPU's memory, in (0, 1]: weights, the
            largest step, CUDA graphs and the pool, together (MEM-1).
        enable_prefix_caching: share the KV of equal prefixes between requests.
        scheduling_policy, max_consecutive_prefills: see `SchedulerConfig`.
        tensor_parallel_size: ranks that share each layer.
        data_parallel_size: engines that share the requests, each with all of the options above.
        attention_backend: `torch` runs everywhere; `triton` and `flash_attn` need CUDA. `auto` is
            `triton` on CUDA and `torch` elsewhere.
        enforce_eager: never use CUDA graphs.
        async_scheduling: on CUDA, plan and launch a step before the tokens of the one before it are
            known, so that the GPU never waits for the host. Tokens are the same either way.
        device: `auto` (CUDA if there is one), `cpu` or `cuda`.
        dtype: `auto` is float32 on a CPU and the checkpoint's own elsewhere.
        kv_cache_dtype: `auto` is that of the weights; `fp8` (e4m3, not scaled) halves the bytes
            that attention reads and holds twice the tokens, at a loss of precision.
        skip_tokenizer: token ids in, token ids out; for checkpoints without a tokenizer.
        seed: of the requests that bring none; None draws it from the system.
        trace: file to which plans and tokens are logged, for `nanovllm conformance check`.
    """

    model: str | Path = EMBEDDED_MODEL
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    kvcache_memory_gb: float | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    scheduling_policy: Policy = "prefill_first"
    max_consecutive_prefills: int = 8
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    attention_backend: Literal["auto", "torch", "triton", "flash_attn"] = "auto"
    enforce_eager: bool = False
    async_scheduling: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    skip_tokenizer: bool = False
    seed: int | None = None
    trace: str | Path | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_consecutive_prefills",
            "tensor_parallel_size",
            "data_parallel_size",
        ):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "kvcache_block_size", "num_kvcache_blocks"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        _check_share("gpu_memory_utilization", self.gpu_memory_utilization, 1)
        if self.kvcache_memory_gb is not None:
            _check_share("kvcache_memory_gb", self.kvcache_memory_gb, sys.float_info.max)
        for name in (
            "enable_prefix_caching",
            "enforce_eager",
            "async_scheduling",
            "skip_tokenizer",
        ):
            _check_bool(name, getattr(self, name))
        _check_seed(self.seed)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: a decode step could not serve every sequence"
            )
        if self.trace is not None and self.data_parallel_size > 1:
            raise ValueError(
                f"trace={str(self.trace)!r} is the log of one engine, "
                f"not of data_parallel_size={self.data_parallel_size}"
            )
        _check_choice("scheduling_policy", self.scheduling_policy, get_args(Policy))
        _check_choice(
            "attention_backend", self.attention_backend, ("auto", "torch", "triton", "flash_attn")
        )
        _check_choice("device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8"))
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))

    @classmethod
    def from_options(cls, model: str | Path | None, options: dict[str, Any]) -> Config:
        """Config of `LLM(model, **options)`; TypeError that lists the valid names (API-3)."""
        valid = {f.name for f in fields(cls)} - {"model"}
        unknown = sorted(set(options) - valid)
        if unknown:
            names = ", ".join(sorted(valid))
            raise TypeError(f"unknown option {', '.join(unknown)}; the valid ones are {names}")
        return cls(**options) if model is None else cls(model, **options)
