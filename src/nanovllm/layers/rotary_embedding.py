"""Rotary position embedding (RoFormer, Su et al. 2021), in the half-split layout of Qwen and Llama.

Dimension i of a head is paired with dimension `i + head_dim / 2`, and the pair is turned by the
angle `position * theta ** (-2 * i / head_dim)` (MOD-4).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn


@dataclass(frozen=True)
class Rotation:
    """The angles of a step's T positions; every layer turns its heads by the same ones.

    Attributes:
        cos_sin: float32 [max_positions, 2, head_dim / 2], the whole table.
        positions: int64 [T].
    """

    cos_sin: torch.Tensor
    positions: torch.Tensor

    @cached_property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(cos, sin)`, each `[T, 1, head_dim / 2]` float32."""
        cos, sin = torch.split(self.cos_sin[self.positions], 1, dim=1)
        return cos, sin


class RotaryEmbedding(nn.Module):
    """Table of the cosines and sines of all positions, float32."""

    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / theta**exponents)
        cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """`positions: [T] int64`."""
        return Rotation(self.cos_sin, positions)
