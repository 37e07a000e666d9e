"""A linear layer for one row: bound by the bytes of the weights, so read them once.

There cuBLAS reaches a tenth to a half of the memory's bandwidth. Here a program takes one to four
output columns and the whole input, so that all its loads are in flight before the first is used;
and the weights, which no kernel writes, are on their way before the input is there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels._triton import cdiv, jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs

NARROW = 2048
"""Output features up to which one column a program is enough to fill a large GPU."""

HEAD = 65_536
"""Output features that only a head has: four columns a program fill a GPU many times over."""


class SmallConfig(NamedTuple):
    """How a program works: output columns, inputs per step, warps."""

    block_n: int
    block_k: int
    num_warps: int


def small_config(out_features: int) -> SmallConfig:
    """Enough programs to fill a large GPU; measured on an H200, see `docs/performance.md`."""
    if out_features <= NARROW:
        return SmallConfig(block_n=1, block_k=2048, num_warps=4)
    return SmallConfig(block_n=2 if out_features < HEAD else 4, block_k=1024, num_warps=4)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`: one row without a bias here, all else by a library."""
    if len(x) != 1 or bias is not None:
        return F.linear(x, weight, bias)
    return small_linear(x, weight)


def small_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What `small_linear` computes."""
    return F.linear(x, weight)


def small_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`: x [1, K] and weight [N, K], both contiguous, to [1, N]."""
    assert len(x) == 1, x.shape
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    out_features, in_features = weight.shape
    block_n, block_k, num_warps = small_config(out_features)
    out = x.new_empty(1, out_features)
    _small_linear_kernel[(cdiv(out_features, block_n),)](
        x,
        weight,
        out,
        out_features,
        IN_FEATURES=in_features,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, next_power_of_2(in_features)),
        num_warps=num_warps,
        launch_pdl=True,
    )
    return out


@jit
def _small_linear_kernel(
    x,
    weight,
    out,
    out_features,
    IN_FEATURES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < out_features
    rows = weight + n.to(tl.int64)[:, None] * IN_FEATURES
    k = tl.arange(0, BLOCK_K)
    w = tl.load(rows + k[None, :], inside[:, None] & (k < IN_FEATURES)[None, :], 0.0)
    wait_for_inputs()
    acc = w.to(tl.float32) * tl.load(x + k, k < IN_FEATURES, 0.0).to(tl.float32)
    for start in tl.static_range(BLOCK_K, IN_FEATURES, BLOCK_K):
        here = start + k < IN_FEATURES
        w = tl.load(rows + start + k[None, :], inside[:, None] & here[None, :], 0.0)
        acc += w.to(tl.float32) * tl.load(x + start + k, here, 0.0).to(tl.float32)
    tl.store(out + n, tl.sum(acc, 1), inside)
