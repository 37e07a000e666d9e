"""A linear layer for one to a few rows: bound by the bytes of the weights, so read them once.

At one row cuBLAS reaches a fifth to a half of the memory's bandwidth. Here a program takes a few
output columns and the whole input, so that all its loads are in flight before the first is used;
and the weights, which no kernel writes, are on their way before the input is there.

A few rows more are worth a tensor core, which takes 16 of them for the price of one, and 32 for
little more where there are programs enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels._triton import cdiv, jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs

NARROW = 2048
"""Output features up to which one column a program is enough to fill a large GPU."""

DEEP = 8192
"""Input features beyond which a library does better, as it splits the sum over programs."""

MAX_ROWS = 32


class SmallConfig(NamedTuple):
    """How a program works: output columns, inputs per step, warps, depth of the pipeline."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def small_config(num_rows: int, out_features: int) -> SmallConfig:
    """Enough programs to fill a large GPU; measured on an H200, see `docs/performance.md`."""
    narrow = out_features <= NARROW
    if num_rows > 1:
        num_warps = 4 if narrow or num_rows > 16 else 2
        return SmallConfig(block_n=32, block_k=128, num_warps=num_warps, num_stages=5)
    if narrow:
        return SmallConfig(block_n=1, block_k=2048, num_warps=4, num_stages=3)
    return SmallConfig(block_n=2, block_k=1024, num_warps=4, num_stages=3)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` by whichever is faster: few rows here, many rows by the library."""
    if bias is None and _is_small(x, weight):
        return small_linear(x, weight)
    return F.linear(x, weight, bias)


def _is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    num_rows, in_features = x.shape
    if num_rows == 1:
        return True
    if x.dtype == torch.float32 or num_rows > MAX_ROWS:
        return False
    return num_rows <= 16 or (len(weight) > NARROW and in_features <= DEEP)


def small_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What `small_linear` computes."""
    return F.linear(x, weight)


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, config: SmallConfig | None = None
) -> torch.Tensor:
    """`x @ weight.T`: x [M, K] with 1 <= M <= 32 and weight [N, K], both contiguous, to [M, N]."""
    num_rows, in_features = x.shape
    assert 1 <= num_rows <= MAX_ROWS, num_rows
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    out_features = len(weight)
    block_n, block_k, num_warps, num_stages = config or small_config(num_rows, out_features)
    out = x.new_empty(num_rows, out_features)
    block_m = 1 if num_rows == 1 else max(16, next_power_of_2(num_rows))
    kernel = _one_row_kernel if num_rows == 1 else _few_rows_kernel
    kernel[(cdiv(out_features, block_n),)](
        x,
        weight,
        out,
        num_rows,
        out_features,
        IN_FEATURES=in_features,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, max(16, next_power_of_2(in_features))),
        num_warps=num_warps,
        num_stages=num_stages,
        launch_pdl=True,
    )
    return out


@jit
def _one_row_kernel(
    x,
    weight,
    out,
    num_rows,
    out_features,
    IN_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
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


@jit
def _few_rows_kernel(
    x,
    weight,
    out,
    num_rows,
    out_features,
    IN_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_inputs()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = n < out_features
    rows = weight + n.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    inputs = x + m[:, None] * IN_FEATURES + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        here = (start + k < IN_FEATURES)[None, :]
        w = tl.load(rows + start, inside[:, None] & here, 0.0)
        a = tl.load(inputs + start, (m < num_rows)[:, None] & here, 0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    where = m.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out + where, acc, (m < num_rows)[:, None] & inside[None, :])
