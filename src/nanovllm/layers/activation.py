"""The gated activation of the MLP (SwiGLU, Shazeer 2020)."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of a merged projection's output."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gate_up: [T, 2 * n]`, the gates before the values, `-> [T, n]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
