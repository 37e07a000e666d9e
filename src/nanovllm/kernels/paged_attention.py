"""Causal attention of ragged query rows over a paged KV cache (KV-3..5).

PagedAttention: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023.
"""

import torch
import torch.nn.functional as F


def attend_row(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: int,
    scale: float,
) -> torch.Tensor:
    """Dense attention of one request's row over the `context_len` positions that its table names.

    Args:
        q: [C, num_heads, head_dim], the last C of these positions.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        block_table: int64 [ceil(context_len / block_size)].
        scale: of the scores.

    Returns:
        [C, num_heads, head_dim]. Slots beyond the context are cut off, not masked: masking would
        let a NaN in one through, 0 * NaN being NaN (KV-3).
    """
    count, num_heads, head_dim = q.shape
    k, v = (
        cache.index_select(0, block_table).flatten(0, 1)[:context_len].transpose(0, 1).to(q.dtype)
        for cache in (k_cache, v_cache)
    )
    if count == 1:
        # The query heads of a KV head see the same keys: they can be the rows of one matrix.
        grouped = q.view(k.shape[0], -1, head_dim)
        o = F.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)
        return o.reshape(1, num_heads, head_dim)
    seen = torch.ones(count, context_len, dtype=torch.bool, device=q.device)
    o = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=seen.tril(context_len - count),
        scale=scale,
        enable_gqa=True,
    )
    return o[0].transpose(0, 1)
