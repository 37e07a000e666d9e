"""Scatter new keys and values into their slots of the paged cache (KV-1, KV-2)."""

import torch


def store_kvcache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write row i of `key` and `value` to slot `slot_mapping[i]`, in place.

    Args:
        key, value: [T, num_kv_heads, head_dim]; rows beyond the slots are padding.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        slot_mapping: int64 [S], S <= T; `block * block_size + offset`, or -1 for a row that is
            padding and writes nothing.
    """
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    k_cache.view(-1, *k_cache.shape[2:])[slots] = key[rows].to(k_cache.dtype)
    v_cache.view(-1, *v_cache.shape[2:])[slots] = value[rows].to(v_cache.dtype)
