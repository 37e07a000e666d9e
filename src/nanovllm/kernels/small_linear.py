"""A linear layer for one to a few rows: bound by the bytes of the weights, so read them once.

At one row cuBLAS reaches a fifth to a half of the memory's bandwidth. Here a program takes a few
output columns and the whole input, so that all its loads are in flight before the first is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels._triton import cdiv, jit, next_power_of_2, tl

MAX_ROWS = 4
"""Beyond, the tensor cores of a library's product win."""


class SmallConfig(NamedTuple):
    """How a program works: output columns, inputs per step, warps."""

    block_n: int
    block_k: int
    num_warps: int


def small_config(out_features: int, in_features: int) -> SmallConfig:
    """Enough programs to fill a large GPU, and 8 to 16 KiB of weights in flight in each."""
    block_n = 2 if out_features < 32_768 else 8
    block_k = min(next_power_of_2(in_features), 4096 // block_n * 2)
    return SmallConfig(block_n, block_k, 4)


def small_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What `small_linear` computes."""
    return F.linear(x, weight)


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, config: SmallConfig | None = None
) -> torch.Tensor:
    """`x @ weight.T`: x [M, K] with 1 <= M <= 4 and weight [N, K], both contiguous, to [M, N]."""
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    num_rows, in_features = x.shape
    out_features = len(weight)
    block_n, block_k, num_warps = config or small_config(out_features, in_features)
    out = x.new_empty(num_rows, out_features)
    _small_linear_kernel[(cdiv(out_features, block_n),)](
        x,
        weight,
        out,
        out_features,
        IN_FEATURES=in_features,
        NUM_ROWS=num_rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
    )
    return out


@jit
def _small_linear_kernel(
    x,
    weight,
    out,
    out_features,
    IN_FEATURES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < out_features
    rows = weight + n.to(tl.int64)[:, None] * IN_FEATURES
    for m in tl.static_range(NUM_ROWS):
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, IN_FEATURES, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            here = k < IN_FEATURES
            w = tl.load(rows + k[None, :], inside[:, None] & here[None, :], 0.0)
            acc += w.to(tl.float32) * tl.load(x + m * IN_FEATURES + k, here, 0.0).to(tl.float32)
        tl.store(out + m * out_features + n, tl.sum(acc, 1), inside)
