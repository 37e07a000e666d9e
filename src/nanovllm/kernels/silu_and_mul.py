"""The gated activation of the MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanovllm.kernels._triton import cdiv, jit, tl
from nanovllm.kernels.early_launch import wait_for_inputs

_BLOCK = 1024


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """What `silu_and_mul` computes; gate_up of any shape `[..., 2 * n]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`: [T, 2 * n] with contiguous rows, the gates before the values, to [T, n].

    Rounded as torch does: silu in fp32, cast to the dtype, then times up.
    """
    assert gate_up.is_contiguous(), gate_up.stride()
    n = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), n)
    _silu_and_mul_kernel[(len(gate_up), cdiv(n, _BLOCK))](
        gate_up, out, n, BLOCK=_BLOCK, launch_pdl=True
    )
    return out


@jit
def _silu_and_mul_kernel(gate_up, out, n, BLOCK: tl.constexpr):
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    gates = gate_up + row * 2 * n
    gate = tl.load(gates + column, inside, 0.0)
    up = tl.load(gates + n + column, inside, 0.0)
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype)
    tl.store(out + row * n + column, silu.to(tl.float32) * up.to(tl.float32), inside)
