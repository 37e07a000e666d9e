"""Parameters that load themselves: each knows which part of a checkpoint's tensor it holds."""

from typing import Protocol

import torch
from torch import nn

ShardId = int | str | None


class WeightLoader(Protocol):
    """Copies this rank's part of the full tensor `loaded` into `param`, cast to its dtype.

    `shard_id` names the part of a packed parameter that `loaded` is, and is None elsewhere.
    Raises ValueError, naming both shapes, when `loaded` has the wrong one.
    """

    def __call__(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None: ...


def new_weight(*shape: int, loader: WeightLoader) -> nn.Parameter:
    """An uninitialised parameter of the default dtype, its `weight_loader` attached."""
    weight = nn.Parameter(torch.empty(shape), requires_grad=False)
    weight.weight_loader = loader  # type: ignore[attr-defined]
    return weight


def load_shard(
    target: torch.Tensor, loaded: torch.Tensor, dim: int = 0, index: int = 0, count: int = 1
) -> None:
    """Fills `target` with the `index`-th of `count` equal slices of `loaded` along `dim`."""
    size = target.size(dim)
    full_shape = list(target.shape)
    full_shape[dim] = size * count
    check_shape(loaded, tuple(full_shape))
    target.copy_(loaded.narrow(dim, index * size, size))


def load_whole(param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None) -> None:
    """The weight loader of a parameter that every rank holds in full."""
    load_shard(param, loaded)


def check_shape(loaded: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless the checkpoint's tensor has the shape the model expects."""
    if tuple(loaded.shape) != expected:
        raise ValueError(f"has shape {tuple(loaded.shape)}, the model expects {expected}")
