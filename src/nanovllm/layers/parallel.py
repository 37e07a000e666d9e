"""Tensor parallelism as a value: which rank this is, of how many, and how they talk.

Every layer is given its `TensorParallel`; there is no global rank, so that two engines, or all
ranks of one, can live in a single process.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel group; the default is a group of one, which never communicates.

    `group` is the process group to communicate over, None meaning torch's default group.
    Raises ValueError unless `0 <= rank < size`.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

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
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x: [..., n]`, side by side in rank order: `[..., n * size]`."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
