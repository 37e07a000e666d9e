"""The gated activation of the MLP (SwiGLU, Shazeer 2020)."""

import torch
from torch import nn

from nanovllm.layers.ops import TORCH_OPS, Ops


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of a merged projection's output."""

    def __init__(self, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gate_up: [T, 2 * n]`, the gates before the values, `-> [T, n]`."""
        return self.ops.silu_and_mul(gate_up)
