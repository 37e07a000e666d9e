"""A linear layer for one to a few rows: bound by the bytes of the weights, so read them once.

At one row cuBLAS reaches a fifth to a half of the memory's bandwidth. Here a program takes a few
output columns and the whole input, so that all its loads are in flight before the first is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels._triton import cdiv, jit, next_power_of_2, tl

NARROW = 2048
"""Output features up to which a library's product leaves most of a large GPU idle."""


class SmallConfig(NamedTuple):
    """How a program works: output columns, inputs per step, warps."""

    block_n: int
    block_k: int
    num_warps: int


def small_config(out_features: int) -> SmallConfig:
    """Enough programs to fill a large GPU; measured on an H200, see `docs/performance.md`."""
    if out_features <= NARROW:
        return SmallConfig(block_n=1, block_k=2048, num_warps=4)
    return SmallConfig(block_n=2, block_k=1024, num_warps=4)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` by whichever is faster: one row here, many rows by the library.

    Few outputs give a library few tiles, so up to four rows of a narrow layer are done here, too.
    """
    num_rows = len(x)
    few = num_rows == 1 or (num_rows <= 4 and len(weight) <= NARROW)
    if bias is not None or not few:
        return F.linear(x, weight, bias)
    return small_linear(x, weight)


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
    block_n, block_k, num_warps = config or small_config(out_features)
    out = x.new_empty(num_rows, out_features)
    _small_linear_kernel[(cdiv(out_features, block_n),)](
        x,
        weight,
        out,
        out_features,
        IN_FEATURES=in_features,
        NUM_ROWS=num_rows,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, next_power_of_2(in_features)),
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
