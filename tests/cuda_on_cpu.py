"""The runner of CUDA on a CPU: kernels by their references, no graphs, and events that are past."""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from nanovllm.config import Config
from nanovllm.engine import cuda_buffers, cuda_runner, decode_state, device_sampler, runners
from nanovllm.engine.cuda_runner import CudaModelRunner
from nanovllm.engine.decode_state import Seats, Taken
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step import ScheduledRow
from nanovllm.kernels.decode_inputs import decode_inputs_reference
from nanovllm.kernels.keep_tokens import keep_tokens_reference, post_tokens_reference
from nanovllm.kernels.sample import sample_reference
from nanovllm.kernels.sampling_threshold import sampling_threshold_reference
from nanovllm.layers.backends import select_backend
from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig


class PastEvent:
    """Of a device that has done everything."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "PastEvent") -> float:
        return 0.0


def run_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Make this process's `CudaModelRunner` one of the CPU.

    Of two rows with one seat a GPU may keep either: here that fails.
    """

    def send(array, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    replaced: dict[str, tuple[object, tuple[ModuleType, ...]]] = {
        "timed_event": (PastEvent, (cuda_buffers, cuda_runner)),
        "send": (send, (decode_state, cuda_runner)),
        "decode_inputs": (decode_inputs_reference, (cuda_runner,)),
        "keep_tokens": (keep_tokens_reference, (cuda_runner,)),
        "post_tokens": (post_tokens_reference, (cuda_runner,)),
        "sampling_threshold": (sampling_threshold_reference, (device_sampler,)),
        "sample": (sample_reference, (device_sampler,)),
    }
    take = Seats.take

    def take_different(seats: Seats, rows: Sequence[ScheduledRow], decodes: bool) -> Taken:
        taken = take(seats, rows, decodes)
        assert len(set(taken.seats.tolist())) == len(rows), taken.seats
        return taken

    patch.setattr(Seats, "take", take_different)
    for name, (stand_in, modules) in replaced.items():
        for module in modules:
            patch.setattr(module, name, stand_in)
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *a, pin_memory=False, **options: empty(*a, **options))
    patch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def put_on_cuda(patch: pytest.MonkeyPatch) -> None:
    """Engines made from here on have it."""
    run_on_cpu(patch)
    patch.setattr(runners, "build_runner", build_runner)


def build_runner(
    config: Config, model_config: ModelConfig, device: torch.device, tp: TensorParallel
) -> ModelRunner:
    backend = select_backend(config.attention_backend, device)
    return CudaModelRunner(config, model_config, backend, device, tp)


def draw_zeros(*arguments: torch.Tensor) -> None:
    arguments[-1].zero_()


def build_cuda_on_cpu(
    config: Config, model_config: ModelConfig, device: torch.device, tp: TensorParallel
) -> ModelRunner:
    """In place of `runners.build_runner`, in the process of another rank, which draws nonsense."""
    patch = pytest.MonkeyPatch()
    run_on_cpu(patch)
    patch.setattr(device_sampler, "sample", draw_zeros)
    return build_runner(config, model_config, device, tp)
