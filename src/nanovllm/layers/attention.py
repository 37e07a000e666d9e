"""The attention layer, and the seam behind which its backends live."""

from typing import NamedTuple, Protocol

import torch
from torch import nn

from nanovllm.kernels.rotary_embedding import apply_rotary_emb
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import Rotation


class HeadNorms(NamedTuple):
    """The norms of every query head and every key head."""

    q: RMSNorm
    k: RMSNorm


class ForwardContext(Protocol):
    """One step as an attention backend sees it: the paged cache and the step's tables.

    A backend builds one per step, so that whatever is the same for all layers is computed once.
    It is passed down the model explicitly.
    """

    def attend(
        self, layer: "Attention", qkv: torch.Tensor, norms: HeadNorms, rotation: Rotation
    ) -> torch.Tensor:
        """From the projections of T tokens to what their heads have read.

        Queries and keys are normed and turned, keys and values stored in their slots of this
        layer's cache; then each row attends to its context.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, then k, then v.

        Returns:
            [T, num_heads * head_dim].
        """
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
        self, qkv: torch.Tensor, norms: HeadNorms, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        """See `ForwardContext.attend`."""
        return context.attend(self, qkv, norms, rotation)

    def heads(
        self, qkv: torch.Tensor, norms: HeadNorms, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], normed and turned.

        The reference of what a backend may fuse.
        """
        parts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(qkv.view(len(qkv), -1, self.head_dim), parts, dim=1)
        cos, sin = rotation.angles
        return apply_rotary_emb(norms.q(q), cos, sin), apply_rotary_emb(norms.k(k), cos, sin), v
