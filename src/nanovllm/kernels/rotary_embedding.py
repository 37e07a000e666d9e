"""Turning the heads of a token by its position (RoFormer, Su et al. 2021): the torch reference."""

import torch


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns `x: [T, heads, head_dim]` by `Rotation.angles`; `x` is left as it was."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
