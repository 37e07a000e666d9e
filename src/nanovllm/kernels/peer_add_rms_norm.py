"""The sum of every rank's rows, the residual stream and RMSNorm, in one kernel.

The end of a row-parallel layer and what follows it. As a kernel of its own, the sum would have to
be written, waited for, and read again.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs
from nanovllm.kernels.peer_all_reduce import (
    PeerBuffers,
    first_value,
    peer_all_reduce_reference,
    second_value,
    sum_of_ranks,
    to_word,
)
from nanovllm.kernels.rms_norm import add_rms_norm_reference

_MAX_WORDS = 8192
"""Of a row, which one program holds."""


def peer_add_rms_norm_reference(
    parts: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `peer_add_rms_norm` returns on every rank."""
    return add_rms_norm_reference(peer_all_reduce_reference(parts), residual, weight, eps)


def takes_rows(x: torch.Tensor, buffers: PeerBuffers) -> bool:
    """Whether `peer_add_rms_norm` can do it: few rows, each of whole words."""
    if x.dim() != 2:
        return False
    row_bytes = x.shape[1] * x.itemsize
    few = 0 < len(x) <= len(buffers.calls) and row_bytes <= 4 * _MAX_WORDS
    return few and row_bytes % 4 == 0 and buffers.takes(x)


def peer_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    buffers: PeerBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of the sum of the x of all ranks, with its roundings.

    x and residual are contiguous [T, n], in fp32, fp16 or bf16, and the residual is equal on all
    ranks. All ranks have to make the same calls with x of equal sizes, and all of them rows of one
    n: a call is counted by row. What `takes_rows` refuses must not be passed.
    """
    assert takes_rows(x, buffers), (x.shape, x.dtype, x.stride())
    assert residual.is_contiguous(), residual.stride()
    y, total = torch.empty_like(x), torch.empty_like(x)
    num_words = x.shape[1] * x.itemsize // 4
    block = next_power_of_2(num_words)
    _peer_add_rms_norm_kernel[(len(x),)](
        *(tensor.view(torch.int32) for tensor in (x, residual, weight, y, total)),
        eps,
        **buffers.arguments(x.dtype),
        NUM_WORDS=num_words,
        BLOCK=block,
        num_warps=min(max(block // 128, 1), 8),
        launch_pdl=True,
    )
    return y, total


@jit
def _peer_add_rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    total,
    eps,
    addresses,
    calls,
    aborted,
    NUM_WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one row, as words of one or two values."""
    wait_for_inputs()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < NUM_WORDS
    i = row * NUM_WORDS + column
    mine = tl.load(x + i, inside, 0)
    before = tl.load(residual + i, inside, 0)
    w = tl.load(weight + column, inside, 0)
    low, high = sum_of_ranks(
        mine, i, inside, addresses, calls + row, aborted, DTYPE, RANK, SIZE, CAPACITY
    )
    summed = to_word(low, high, DTYPE)
    low = first_value(summed, DTYPE) + first_value(before, DTYPE)
    high = second_value(summed, DTYPE) + second_value(before, DTYPE)
    added = to_word(low, high, DTYPE)
    tl.store(total + i, added, inside)

    low = first_value(added, DTYPE)
    squares = low * low
    values: tl.constexpr = NUM_WORDS * (32 // DTYPE.primitive_bitwidth)
    if DTYPE.primitive_bitwidth == 16:
        high = second_value(added, DTYPE)
        squares += high * high
    inverse_rms = tl.rsqrt(tl.sum(squares, 0) / values + eps)
    normed = to_word(low * inverse_rms, high * inverse_rms, DTYPE)
    low = first_value(normed, DTYPE) * first_value(w, DTYPE)
    high = second_value(normed, DTYPE) * second_value(w, DTYPE)
    tl.store(y + i, to_word(low, high, DTYPE), inside)
