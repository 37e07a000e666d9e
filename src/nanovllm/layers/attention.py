"""The attention layer, and the seam behind which its backends live."""

from typing import Protocol

import torch
from torch import nn


class ForwardContext(Protocol):
    """One step as an attention backend sees it: the paged cache and the step's tables.

    A backend builds one per step, so that whatever is the same for all layers is computed once.
    It is passed down the model explicitly.
    """

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store k and v [T, num_kv_heads, head_dim] in their slots of this layer's cache, then
        attend with q [T, num_heads, head_dim] to each row's context; returns q's shape."""
        ...


class Attention(nn.Module):
    """Grouped-query attention over the paged cache; heads are those of this rank."""

    def __init__(
        self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int, layer_id: int
    ) -> None:
        super().__init__()
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads"
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, heads * dim]."""
        return context.attend(self.layer_id, q, k, v, self.scale).flatten(1)
