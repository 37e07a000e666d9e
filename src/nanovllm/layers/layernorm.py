"""RMSNorm (Zhang & Sennrich 2019), alone or fused with the addition of a residual stream."""

from typing import overload

import torch
from torch import nn

from nanovllm.layers.weight import load_whole, new_weight


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension.

    Normalised in float32, cast to the dtype of `x`, then multiplied by `weight`: the roundings of
    the checkpoint's own training code (MOD-4). No argument is modified (MOD-3).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
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
        """`norm(x)`, or `(norm(x + residual), x + residual)`; all `[..., size]`."""
        if residual is None:
            return self._normalise(x)
        total = x + residual
        return self._normalise(total), total

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        inverse_rms = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (x32 * inverse_rms).to(x.dtype)
