"""Tensor parallelism as a value: which rank this is, of how many, and how they talk.

Every layer is given its `TensorParallel`; there is no global rank, so that two engines, or all
ranks of one, can live in a single process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

Both = tuple[torch.Tensor, torch.Tensor]
AddRMSNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Both]
"""`Ops.add_rms_norm`."""


class Group(Protocol):
    """What is used of a process group of torch, or of one of its backends, and a kernel more.

    Called directly: the functions of `torch.distributed` want groups that are registered in that
    module, of which a process has one set, and two engines may live in one process.
    """

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None: ...

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None: ...

    def _allgather_base(
        self, output: torch.Tensor, x: torch.Tensor, opts: Any
    ) -> dist.Work | None: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Both | None:
        """`Ops.add_rms_norm` of the sum of every rank's x, or None if that is not one kernel."""
        ...


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel group; the default is a group of one, which never communicates.

    `group` is what it communicates over; None is enough for cutting weights.
    Raises ValueError unless `0 <= rank < size`.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, size), got rank {self.rank}, size {self.size}")

    def divide(self, total: int, what: str) -> int:
        """This rank's share of `total`. Raises ValueError when it does not split evenly (TP-3c)."""
        if total % self.size:
            raise ValueError(f"{what} = {total} does not split over {self.size} ranks")
        return total // self.size

    def divide_or_replicate(self, total: int, what: str) -> tuple[int, int]:
        """`(share, replicas)`: this rank's share of `total`, and how many ranks hold the same one.

        With fewer items than ranks each rank holds one, and neighbouring ranks share it (TP-3b).
        Raises ValueError when neither number divides the other (TP-3c).
        """
        if total >= self.size:
            return self.divide(total, what), 1
        if self.size % total:
            raise ValueError(f"{what} = {total} does not replicate over {self.size} ranks")
        return 1, self.size // total

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which is overwritten by it."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def add_rms_norm(
        self,
        add_rms_norm: AddRMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> Both:
        """`add_rms_norm` of the sum of every rank's `x`."""
        if self.size > 1:
            both = self._group.add_rms_norm(x, residual, weight, eps)
            if both is not None:
                return both
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest of every rank's `value`; `device` is where the group communicates."""
        if self.size == 1:
            return value
        return int(self._reduce(torch.tensor([value], device=device), dist.ReduceOp.MIN).item())

    def _reduce(self, x: torch.Tensor, op: Any) -> torch.Tensor:
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            options.asyncOp = False  # on the stream that computes, also while a graph records
            _wait(self._group.allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x: [..., n]`, side by side in rank order: `[..., n * size]`."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size * x.numel())
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._group._allgather_base(parts, x.contiguous().view(-1), options))
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, which overwrites everyone's."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.asyncOp = False
            _wait(self._group.broadcast([x], options))
        return x

    @property
    def _group(self) -> Group:
        assert self.group is not None, f"rank {self.rank} of {self.size} has no group to talk to"
        return self.group


def _wait(work: dist.Work | None) -> None:
    """Order what follows behind `work`. NCCL has done so, and returns None, if not asynchronous."""
    if work is not None:
        work.wait()
