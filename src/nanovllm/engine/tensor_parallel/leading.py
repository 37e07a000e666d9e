"""The runner of rank 0: what it computes, all ranks are told to compute."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
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
        super().close()
        self._end_ranks()


class LeadingRunner(Leading):
    """On a CPU."""

    def compute_logits(self, inputs: ModelInput) -> torch.Tensor:
        with self.told("compute_logits", inputs):
            return super().compute_logits(inputs)
