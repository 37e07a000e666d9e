"""The runner of rank 0: what it computes, all ranks are told to compute."""

from __future__ import annotations

import atexit
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from nanovllm.engine.model_input import ModelInput
from nanovllm.engine.model_runner import ModelRunner, RankInfo
from nanovllm.engine.tensor_parallel.ranks import Ranks


class Leading(ModelRunner):
    """Makes a runner lead the other ranks; it and they have to be built at the same time."""

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        self.ranks = ranks
        self._leads = False  # while each rank builds itself
        super().__init__(*args)
        self._leads = True
        self._end_ranks = weakref.finalize(self, ranks.close)
        # Before that, at the end of the program: graphs have to be gone when NCCL's group ends.
        self._at_exit = partial(close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    def told(self, method: str, *args: object) -> AbstractContextManager[None]:
        """All other ranks call `method`, as this one does in the block."""
        return self.ranks.told(method, *args) if self._leads else nullcontext()

    @property
    def fault(self) -> str | None:  # type: ignore[override]
        return self.ranks.fault

    @property
    def rank_infos(self) -> list[RankInfo]:
        return [self.rank_info, *(self.ranks.infos[rank] for rank in sorted(self.ranks.infos))]

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        try:
            super().close()  # raises if the device has failed and nobody knows yet
        finally:
            self._end_ranks()


def close_if_alive(runner: weakref.ref[Leading]) -> None:
    alive = runner()
    if alive is not None:
        alive.close()


class LeadingRunner(Leading):
    """On a CPU."""

    def compute_logits(self, inputs: ModelInput) -> torch.Tensor:
        with self.told("compute_logits", inputs):
            return super().compute_logits(inputs)
