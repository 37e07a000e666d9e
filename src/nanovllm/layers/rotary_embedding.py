"""Rotary position embedding (RoFormer, Su et al. 2021), in the half-split layout of Qwen and Llama.

Dimension i of a head is paired with dimension `i + head_dim / 2`, and the pair is turned by the
angle `position * theta ** (-2 * i / head_dim)` (MOD-4).
"""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """Table of the cosines and sines of all positions, float32.

    A step looks its positions up once, and every layer turns its heads by the same angles.
    """

    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / theta**exponents)
        cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`positions: [T] int64 -> (cos, sin)`, each `[T, 1, head_dim / 2]` float32."""
        cos, sin = torch.split(self.cos_sin[positions], 1, dim=1)
        return cos, sin


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns `x: [T, heads, head_dim]` by `RotaryEmbedding`'s angles; `x` is left as it was."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
