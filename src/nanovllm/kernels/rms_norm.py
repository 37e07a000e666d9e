"""RMSNorm (Zhang & Sennrich 2019), alone or with the addition of the residual stream (MOD-4).

Roundings are those of the checkpoints' training code: normalised in fp32, cast to the dtype of x,
then multiplied by the weight. A sum is rounded before it is normalised, as it is when torch adds.
No argument is modified (MOD-3).
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What `rms_norm` computes; x of any shape `[..., n]`."""
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (x32 * inverse_rms).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `add_rms_norm` computes."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight`, x `[T, n]` with any stride between rows."""
    y = x.new_empty(x.shape)
    n = x.shape[1]
    block = next_power_of_2(n)
    _rms_norm_kernel[(len(x),)](
        x, weight, y, x.stride(0), n, eps, BLOCK=block, num_warps=_num_warps(block), launch_pdl=True
    )
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`, both inputs `[T, n]` with contiguous rows."""
    assert x.is_contiguous(), x.stride()
    assert residual.is_contiguous(), residual.stride()
    y, total = torch.empty_like(x), torch.empty_like(x)
    n = x.shape[1]
    block = next_power_of_2(n)
    _add_rms_norm_kernel[(len(x),)](
        x,
        residual,
        weight,
        y,
        total,
        n,
        eps,
        BLOCK=block,
        num_warps=_num_warps(block),
        launch_pdl=True,
    )
    return y, total


def _num_warps(block: int) -> int:
    """Eight elements, 16 bytes of a 16-bit dtype, per thread; at most 8 warps."""
    return min(max(block // 256, 1), 8)


@jit
def _rms_norm_kernel(x, weight, y, x_stride, n, eps, BLOCK: tl.constexpr):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    x_row = tl.load(x + row * x_stride + column, inside, 0.0)
    w = tl.load(weight + column, inside, 0.0)
    tl.store(y + row * n + column, _normalise(x_row, w, n, eps), inside)


@jit
def _add_rms_norm_kernel(x, residual, weight, y, total, n, eps, BLOCK: tl.constexpr):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    offset = row * n + column
    x_row = tl.load(x + offset, inside, 0.0)
    residual_row = tl.load(residual + offset, inside, 0.0)
    w = tl.load(weight + column, inside, 0.0)
    total_row = (x_row.to(tl.float32) + residual_row.to(tl.float32)).to(x_row.dtype)
    tl.store(total + offset, total_row, inside)
    tl.store(y + offset, _normalise(total_row, w, n, eps), inside)


@jit
def _normalise(x, weight, n, eps):
    """The rows of x [..., N], of which n columns are not padding (and padding is 0)."""
    x32 = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x32 * x32, -1, keep_dims=True) / n + eps)
    normed = (x32 * inverse_rms).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
