"""The runner on CUDA: decode steps as graphs from seats to tokens, everything else eager.

A decode step mails the device three short rows, seats, lengths and new blocks, and replays one
graph, which mails the tokens back. All else that it needs is there already, see `decode_state`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.config import Config
from nanovllm.engine.cuda_buffers import DecodeInputs, TokenCopies, TokenCopy, timed_event
from nanovllm.engine.decode_graphs import DecodeGraphs, graph_batch_sizes
from nanovllm.engine.decode_state import DecodeState, Int32, Seats, SeatUpdates, send
from nanovllm.engine.device_sampler import DeviceSampler
from nanovllm.engine.gpu_memory import GpuMemory, MemoryMeter
from nanovllm.engine.largest_step import largest_step
from nanovllm.engine.model_input import ModelInput, name_pending_tokens, prepare_model_input
from nanovllm.engine.model_runner import (
    DoneStep,
    ModelRunner,
    PendingStep,
    StepResult,
    by_sequence,
    sampling_row,
)
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledRow, ScheduledStep
from nanovllm.kernels._triton import compiling
from nanovllm.kernels.decode_inputs import decode_inputs
from nanovllm.kernels.keep_tokens import keep_tokens, post_tokens
from nanovllm.layers.backend import AttentionInput, Backend
from nanovllm.layers.parallel import TensorParallel
from nanovllm.layers.sampler import RowSampling, SamplerOutput, SamplingInput
from nanovllm.models.model_config import ModelConfig


class CudaModelRunner(ModelRunner):
    """See `ModelRunner`; the backend's decode steps can be captured."""

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        backend: Backend,
        device: torch.device,
        tp: TensorParallel | None = None,
    ) -> None:
        self.meter = MemoryMeter(device)
        self.graphs: DecodeGraphs | None = None
        super().__init__(config, model_config, backend, device, tp)
        self.steps_ahead = int(config.async_scheduling)
        if not config.enforce_eager:
            self.graphs = self._capture(graph_batch_sizes(config.max_num_seqs))
            self.num_graphs, self.graph_seconds = len(self.graphs.sizes), self.graphs.seconds
        # A full collection looks at every object there is, those of all imported libraries, while
        # the device waits: a quarter of a second. What is there now is here to stay.
        gc.collect()
        gc.freeze()

    def _make_state(self) -> None:
        num_seats = self.config.max_num_seqs
        self.seats = Seats(num_seats, self.max_blocks_per_seq)
        self.state = DecodeState(num_seats, self.max_blocks_per_seq, self.device)
        self.device_sampler = DeviceSampler(self.state, num_seats, self.device)
        self.inputs = DecodeInputs(num_seats, self.device)
        self.copies = TokenCopies(num_seats)

    @torch.inference_mode()
    def _capture(self, batch_sizes: list[int]) -> DecodeGraphs:
        graphs = DecodeGraphs(self._decode_rows, batch_sizes)
        self.inputs.restart()
        return graphs

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Kernels of prompts and of decode steps are compiled, which one by one takes far longer.

        Those of a decode step depend on whether its batch is beyond this or that power of two.
        """
        max_rows = self.config.max_num_seqs
        self.kv_cache = self._new_kv_cache(1)
        self._make_state()
        with compiling():
            with torch.inference_mode():
                self.compute_logits(self._largest_step()[0])
                for size in {min(1 << i, max_rows) for i in range(max_rows.bit_length() + 1)}:
                    self._decode_rows(size)
            yield
        self.inputs.restart()
        del self.kv_cache

    # ---- memory ----------------------------------------------------------------------------

    def _kv_budget(self) -> tuple[int, str]:
        if self.config.kvcache_memory_gb is not None:
            return super()._kv_budget()
        memory = self._measure_memory()
        share = self.config.gpu_memory_utilization
        return memory.kv_budget(share), f"what gpu_memory_utilization={share} leaves ({memory})"

    @torch.inference_mode()
    def _measure_memory(self) -> GpuMemory:
        """Run the largest legal step, and record the largest graph, on a cache of one block."""
        weights = self.meter.allocated()
        self.kv_cache = self._new_kv_cache(1)
        peak = self.meter.peak_of(self._run_largest_step)
        graphs = 0
        if not self.config.enforce_eager:
            graphs = self.meter.kept_by(lambda: self._capture([self.config.max_num_seqs]))
        del self.kv_cache
        return self.meter.memory(weights, peak, graphs)

    def _largest_step(self) -> tuple[ModelInput, list[RowSampling]]:
        return largest_step(self.config, self.max_model_len, self.block_size)

    def _run_largest_step(self) -> None:
        inputs, rows = self._largest_step()
        self.sampler(self.compute_logits(inputs), SamplingInput.from_rows(rows))

    # ---- a step ----------------------------------------------------------------------------

    def run(self, step: ScheduledStep) -> StepResult:
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> PendingStep:
        self._begun = timed_event()
        self._begun.record()
        rows = step.rows
        # One that was preempted, and has but its last position to compute, has to bring its token.
        decodes = all(row.is_decode and self.seats.knows(row.seq) for row in rows)
        if decodes:
            # The longest first, so that the programs that start last are short.
            rows = tuple(sorted(rows, key=lambda row: -row.end))
        seats, new_blocks, updates = self.seats.take(rows, decodes)
        self.update(updates)
        if decodes:
            context_lens = np.fromiter((row.end for row in rows), dtype=np.int32, count=len(rows))
            logits = self.decode(seats, context_lens, new_blocks)
            return self._finish(logits, rows, seats, self.inputs.tokens_of_last(len(rows)))
        inputs = prepare_model_input(step, self.block_size)
        name_pending_tokens(inputs, seats)
        logits = self.compute_logits(inputs)
        picked = [i for i, row in enumerate(rows) if row.samples]
        if not picked:
            return DoneStep(StepResult())
        return self._finish(logits, [rows[i] for i in picked], seats[picked], None)

    def needs_last_tokens(self, step: ScheduledStep) -> bool:
        return not all(self.seats.is_plain(row.seq) for row in step.rows if row.samples)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return send(array, self.device)

    def _input_ids(self, inputs: ModelInput) -> torch.Tensor:
        input_ids = super()._input_ids(inputs)
        if inputs.input_ids.min() >= 0:
            return input_ids
        seats = (-1 - input_ids).clamp(min=0)
        return torch.where(input_ids < 0, self.state.last_tokens[seats], input_ids)

    def forget(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            self.seats.leave(seq)

    # ---- what every rank does alike; `compute_logits` is one of these ------------------------

    def update(self, updates: SeatUpdates) -> None:
        """Bring seats up to date, before the step that needs them."""
        self.state.apply(updates)

    @torch.inference_mode()
    def decode(self, seats: Int32, context_lens: Int32, new_blocks: Int32) -> torch.Tensor:
        """Logits of a decode step, its tokens drawn: by a graph, or eagerly where none fits."""
        size = self.graphs.size_for(len(seats)) if self.graphs else None
        self.inputs.stage(seats, context_lens, new_blocks, size or len(seats))
        if self.graphs is None or size is None:
            logits = self._decode_rows(len(seats))
        else:
            logits = self.graphs.replay(size)
        self.inputs.launched()
        return logits

    @torch.inference_mode()
    def keep_tokens(self, seats: Int32, tokens: torch.Tensor | None = None) -> None:
        """Go on from the tokens `[len(seats)]` that rank 0 drew; others than it have none."""
        if tokens is None:
            tokens = torch.empty(len(seats), dtype=torch.int64, device=self.device)
        self._keep(self._to_device(seats), tokens)

    def _keep(self, seats: torch.Tensor, tokens: torch.Tensor) -> None:
        keep_tokens(self.state.last_tokens, seats, self.tp.broadcast(tokens))

    def _decode_rows(self, size: int) -> torch.Tensor:
        """Launch the decode of the first `size` rows of the static inputs; what graphs record."""
        inputs, state = self.inputs, self.state
        seats, context_lens = inputs.seats[:size], inputs.context_lens[:size]
        input_ids, positions = inputs.input_ids[:size], inputs.positions[:size]
        slot_mapping = inputs.slot_mapping[:size]
        decode_inputs(
            inputs.to_device,
            inputs.turn,
            state.last_tokens,
            state.block_tables,
            self.block_size,
            seats,
            context_lens,
            input_ids,
            positions,
            slot_mapping,
        )
        context = self.backend.context(
            self.kv_cache,
            AttentionInput(
                slot_mapping,
                state.block_tables,
                seats,
                context_lens,
                inputs.cu_seqlens_q[: size + 1],
                max_query_len=1,
                max_context_len=self.max_model_len,
            ),
        )
        logits = self.model.compute_logits(self.model(input_ids, positions, context))
        tokens = self.device_sampler.draw(logits, seats, context_lens)
        self._keep(seats, tokens)
        post_tokens(tokens, inputs.to_host, inputs.turn)
        return logits

    # ---- tokens ----------------------------------------------------------------------------

    def _finish(
        self,
        logits: torch.Tensor,
        rows: Seq[ScheduledRow],
        seats: Int32,
        drawn: TokenCopy | None,
    ) -> PendingStep:
        """Tokens of rows that sample: those drawn on the device, or all by the host's sampler."""
        seqs = [row.seq for row in rows]
        logits = logits[: len(seqs)]
        if not self.seats.plain[seats].all():
            return DoneStep(self._sample_on_host(logits, seqs, seats))
        if drawn is None:
            positions = self._to_device(np.array([row.end for row in rows], dtype=np.int32))
            tokens = self.device_sampler.draw(logits, self._to_device(seats), positions)
            self.keep_tokens(seats, tokens)
            drawn = self.copies.start(tokens)
        return CopiedStep(seqs, self._begun, drawn)

    def _sample_on_host(
        self, logits: torch.Tensor, seqs: list[Sequence], seats: Int32
    ) -> StepResult:
        rows = [sampling_row(seq, self.model_config.eos_token_ids) for seq in seqs]
        output = self.sampler(logits, SamplingInput.from_rows(rows))
        self.keep_tokens(seats, torch.tensor(output.token_ids, device=self.device))
        return by_sequence(seqs, output)

    def examine(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
            self.inputs.recount()
        except RuntimeError as error:  # errors of CUDA stay until the process ends
            self.fault = f"{self.device}: {error}"

    def close(self) -> None:
        if self.fault is None:
            torch.cuda.synchronize(self.device)  # a step in flight still mails its tokens
        self.graphs = None
        del self.state, self.device_sampler, self.inputs
        super().close()
        gc.unfreeze()
        if self.fault is None:
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step whose tokens are on their way."""

    seqs: list[Sequence]
    begun: torch.cuda.Event
    copy: TokenCopy

    def result(self) -> StepResult:
        tokens = self.copy.wait()
        failed = tuple(i for i, token in enumerate(tokens) if token < 0)
        outcome = by_sequence(self.seqs, SamplerOutput(tokens, failed, [None] * len(tokens)))
        seconds = self.begun.elapsed_time(self.copy.arrived) / 1e3
        return replace(outcome, device_seconds=seconds)
