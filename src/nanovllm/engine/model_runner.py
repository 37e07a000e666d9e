"""Runs a scheduled step on the model: weights, KV cache, arrays to tensors, logits to tokens.

This is the plain runner, which does a step from end to end and knows no kernel of any device.
`cuda_runner.CudaModelRunner` is the fast one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.config import Config
from nanovllm.engine.model_input import ModelInput, prepare_model_input
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.layers.backend import AttentionInput, Backend, Needs
from nanovllm.layers.parallel import TensorParallel
from nanovllm.layers.sampler import RowSampling, Sampler, SamplerOutput, SamplingInput
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.registry import MODEL_CLASSES
from nanovllm.utils.loader import load_model

TokenLogprob = tuple[int, float]

DEFAULT_KVCACHE_GB = 1.0
"""Of a runner that does not measure the memory of its device."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step by seq_id; only rows that sample occur.

    `device_seconds` is how long the step kept the device busy.
    """

    token_ids: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    device_seconds: float = 0.0


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for its tokens. Raises what the device reports."""
        ...


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was over as soon as it was launched."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank, its device, and its part of the KV cache."""

    rank: int
    device: str
    num_blocks: int
    kv_bytes: int


class ModelRunner:
    """One rank's model and KV cache. It never looks at queues.

    Args:
        config: the engine's options.
        model_config: of the checkpoint at `config.model`.
        backend: runs attention and what surrounds it.
        device: where.
        tp: which rank this is.

    Raises ValueError if the memory budget holds no block (MEM-2), or for what the backend cannot
    take (CFG-2).
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        backend: Backend,
        device: torch.device,
        tp: TensorParallel | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.backend = backend
        self.device = device
        self.tp = tp or TensorParallel()
        self.dtype = _resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else self.dtype
        self.block_size = config.kvcache_block_size or backend.default_block_size
        backend.check(
            Needs(device, self.dtype, self.kv_dtype, self.block_size, model_config.head_dim)
        )
        self.max_model_len = min(
            config.max_model_len or model_config.max_position_embeddings,
            model_config.max_position_embeddings,
        )
        self.model = self._new_model()
        with self._preparing():
            load_model(self.model, config.model)
        self.sampler = Sampler()
        num_blocks = config.num_kvcache_blocks or self._num_blocks_in_budget()
        self.num_blocks = self.tp.minimum(num_blocks, device)
        self.kv_cache = self._new_kv_cache(self.num_blocks)

    def _new_model(self) -> Qwen3ForCausalLM:
        """Without its weights."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                model_class = MODEL_CLASSES[self.model_config.architecture]
                return model_class(self.model_config, self.tp, self.backend.ops).eval()
        finally:
            torch.set_default_dtype(previous)

    def _preparing(self) -> AbstractContextManager[None]:
        """What can be done for the model while its weights are loaded."""
        return nullcontext()

    def _kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[K and V, layers, blocks, block_size, this rank's KV heads, head_dim]."""
        num_kv_heads, _ = self.tp.divide_or_replicate(
            self.model_config.num_key_value_heads, "num_key_value_heads"
        )
        return (
            2,
            self.model_config.num_hidden_layers,
            num_blocks,
            self.block_size,
            num_kv_heads,
            self.model_config.head_dim,
        )

    def _new_kv_cache(self, num_blocks: int) -> torch.Tensor:
        # Not zeroed: no slot is read before it is written (KV-3), and unused pages cost nothing.
        shape = self._kv_cache_shape(num_blocks)
        return torch.empty(shape, dtype=self.kv_dtype, device=self.device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V, on this rank."""
        return prod(self._kv_cache_shape(1)) * self.kv_dtype.itemsize

    def _num_blocks_in_budget(self) -> int:
        """What the budget holds, and no more than all sequences at full length could use."""
        budget, origin = self._kv_budget()
        affordable = budget // self.block_bytes
        if affordable < 1:
            raise ValueError(
                f"{origin} is {budget} bytes; "
                f"one KV block of {self.block_size} tokens needs {self.block_bytes}"
            )
        return min(affordable, self.config.max_num_seqs * self.max_blocks_per_seq)

    def _kv_budget(self) -> tuple[int, str]:
        """Bytes for the KV cache, and what they come from."""
        gigabytes = self.config.kvcache_memory_gb or DEFAULT_KVCACHE_GB
        return int(gigabytes * 2**30), f"kvcache_memory_gb={gigabytes}"

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)

    fault: str | None = None
    """Why no step can run any more, and the engine has to end (TP-4)."""

    def examine(self) -> None:
        """After a step that raised: find out whether another one can run; if not, set `fault`."""

    @property
    def rank_info(self) -> RankInfo:
        """What this rank runs on."""
        return RankInfo(
            self.tp.rank, str(self.device), self.num_blocks, self.num_blocks * self.block_bytes
        )

    @property
    def rank_infos(self) -> list[RankInfo]:
        """Those of all ranks, in order."""
        return [self.rank_info]

    steps_ahead = 0
    """Steps that may be launched before the tokens of the one before are known."""

    num_graphs = 0
    """CUDA graphs of decode steps, which took `graph_seconds` to record."""

    graph_seconds = 0.0

    def launch(self, step: ScheduledStep) -> PendingStep:
        """Start a step with at least one row; its tokens come later."""
        started = time.perf_counter()
        outcome = self.run(step)
        return DoneStep(replace(outcome, device_seconds=time.perf_counter() - started))

    def needs_last_tokens(self, step: ScheduledStep) -> bool:
        """Whether the host must know all tokens before it can launch this one."""
        return True

    def forget(self, seqs: Iterable[Sequence]) -> None:
        """These were preempted: what is remembered of their blocks is void."""

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> StepResult:
        """Compute every row's positions, and sample where a row reaches its last known token."""
        logits = self.compute_logits(prepare_model_input(step, self.block_size))
        sampled = [row.seq for row in step.rows if row.samples]
        if not sampled:
            return StepResult()
        rows = [sampling_row(seq, self.model_config.eos_token_ids) for seq in sampled]
        return by_sequence(sampled, self.sampler(logits, SamplingInput.from_rows(rows)))

    @torch.inference_mode()
    def compute_logits(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [S, vocab_size] of the rows that sample; the KV of all T tokens is stored."""
        to_device = self._to_device
        num_rows, counts = len(inputs.context_lens), np.diff(inputs.cu_seqlens_q)
        context = self.backend.context(
            self.kv_cache,
            AttentionInput(
                slot_mapping=to_device(inputs.slot_mapping),
                block_tables=to_device(inputs.block_tables),
                table_rows=torch.arange(num_rows, dtype=torch.int32, device=self.device),
                context_lens=to_device(inputs.context_lens),
                cu_seqlens_q=to_device(inputs.cu_seqlens_q),
                max_query_len=int(counts.max()),
                max_context_len=int(inputs.context_lens.max()),
            ),
        )
        hidden = self.model(self._input_ids(inputs), to_device(inputs.positions), context)
        return self.model.compute_logits(hidden[to_device(inputs.last_tokens)])

    def _input_ids(self, inputs: ModelInput) -> torch.Tensor:
        return self._to_device(inputs.input_ids)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)

    def close(self) -> None:
        """Give the memory back (MEM-3)."""
        del self.model, self.kv_cache


def sampling_row(seq: Sequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """What the sampler needs for the next token of `seq`; histories only if penalties use them."""
    params, position = seq.params, len(seq.token_ids)
    assert params.seed is not None, "the scheduler gives every sequence a seed"
    below_min = params.min_tokens and seq.num_completion_tokens < params.min_tokens
    if not below_min and not params.has_penalties:
        return RowSampling(params, params.seed, position)
    return RowSampling(
        params,
        params.seed,
        position,
        prompt_token_ids=seq.prompt_token_ids if params.has_penalties else (),
        output_token_ids=seq.completion_token_ids if params.has_penalties else (),
        banned_token_ids=params.end_token_ids(eos_token_ids) if below_min else (),
    )


def by_sequence(seqs: list[Sequence], output: SamplerOutput) -> StepResult:
    """What was drawn for the rows of `seqs`, under their ids."""
    failed = {
        seqs[i].seq_id: f"no token to draw at position {seqs[i].num_tokens}: logits not finite"
        for i in output.failed
    }
    return StepResult(
        token_ids={
            seq.seq_id: token_id
            for seq, token_id in zip(seqs, output.token_ids, strict=True)
            if seq.seq_id not in failed
        },
        failed=failed,
        logprobs={
            seq.seq_id: logprobs
            for seq, logprobs in zip(seqs, output.logprobs, strict=True)
            if logprobs is not None
        },
    )


def _resolve_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint
    dtype: torch.dtype = getattr(torch, name)
    return dtype
