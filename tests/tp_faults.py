"""Ranks that fail at a chosen moment, and ranks with a chosen capacity; built in their process."""

import os
import signal
from dataclasses import dataclass

import torch

from nanovllm.config import Config
from nanovllm.engine.model_input import ModelInput
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.backends import select_backend
from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig


@dataclass(frozen=True)
class Fault:
    """What happens to `rank` at its `call`-th step, 0 being its construction."""

    rank: int
    call: int
    kill: bool

    def strike(self) -> None:
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError(f"planted in rank {self.rank}")


class FaultyRunner(ModelRunner):
    """Strikes when rank 0 is about to wait for this rank in a collective."""

    planted: Fault
    calls = 0

    def compute_logits(self, inputs: ModelInput) -> torch.Tensor:
        self.calls += 1
        if (self.tp.rank, self.calls) == (self.planted.rank, self.planted.call):
            self.planted.strike()
        return super().compute_logits(inputs)


def build_faulty(
    planted: Fault,
    config: Config,
    model_config: ModelConfig,
    device: torch.device,
    tp: TensorParallel,
) -> ModelRunner:
    """In place of `runners.build_runner`."""
    if (tp.rank, 0) == (planted.rank, planted.call):
        planted.strike()
    backend = select_backend(config.attention_backend, device)
    runner = FaultyRunner(config, model_config, backend, device, tp)
    runner.planted = planted
    return runner


class SmallRunner(ModelRunner):
    """A rank whose memory holds what `capacities` says."""

    capacities: dict[int, int]

    def _num_blocks_in_budget(self) -> int:
        return self.capacities[self.tp.rank]


def build_small(
    capacities: dict[int, int],
    config: Config,
    model_config: ModelConfig,
    device: torch.device,
    tp: TensorParallel,
) -> ModelRunner:
    """In place of `runners.build_runner`."""
    backend = select_backend(config.attention_backend, device)
    runner_class = type("SmallRunner", (SmallRunner,), {"capacities": capacities})
    return runner_class(config, model_config, backend, device, tp)
