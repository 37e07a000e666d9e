"""A stand-in for the paged cache: one sequence, whole, attended to densely."""

import torch
import torch.nn.functional as F

from nanovllm.layers.torch_attention import HeadsContext


class DenseContext(HeadsContext):
    """A `ForwardContext` whose step is all tokens of one sequence; it keeps nothing."""

    def attend_heads(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention; q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
