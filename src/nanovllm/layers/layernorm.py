"""RMSNorm (Zhang & Sennrich 2019), alone or fused with the addition of a residual stream."""

from typing import overload

import torch
from torch import nn

from nanovllm.layers.ops import TORCH_OPS, Ops
from nanovllm.layers.parallel import TensorParallel
from nanovllm.layers.weight import load_whole, new_weight


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension.

    Normalised in float32, cast to the dtype of `x`, then multiplied by `weight`: the roundings of
    the checkpoint's own training code (MOD-4). No argument is modified (MOD-3), but for the parts
    of a sum: what a row-parallel layer has left to be summed over the ranks of `tp` is summed here.
    """

    def __init__(
        self, size: int, eps: float, ops: Ops = TORCH_OPS, tp: TensorParallel | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.tp = tp or TensorParallel()
        self.weight = new_weight(size, loader=load_whole)

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`norm(x)`, or `(norm(x + residual), x + residual)` of the sum of the x of all ranks; all
        `[..., size]`.
        """
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.tp.add_rms_norm(self.ops.add_rms_norm, x, residual, self.weight, self.eps)
