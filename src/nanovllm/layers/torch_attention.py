"""The torch attention backend: correct everywhere, made for CPUs, the oracle of all others."""

import torch

from nanovllm.kernels.paged_attention import attend_row
from nanovllm.kernels.store_kvcache import store_kvcache_reference


class TorchContext:
    """`ForwardContext` of one step that attends row by row.

    One gather and one SDPA per row: no padding to the longest context, and what is gathered for a
    row stays in the processor's cache until it is used.

    Args:
        kv_cache: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim].
        slot_mapping: int64 [T], -1 writes nothing.
        block_tables: int [R, W].
        context_lens: int [R].
        cu_seqlens_q: int [R + 1].
    """

    def __init__(
        self,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> None:
        self.kv_cache = kv_cache
        self.slot_mapping = slot_mapping
        block_size = kv_cache.shape[3]
        bounds = cu_seqlens_q.tolist()
        tables = block_tables.long()
        self.rows = [
            (slice(bounds[r], bounds[r + 1]), tables[r, : -(-length // block_size)], length)
            for r, length in enumerate(context_lens.tolist())
        ]

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache[0, layer_id], self.kv_cache[1, layer_id]
        store_kvcache_reference(k, v, k_cache, v_cache, self.slot_mapping)
        out = torch.empty_like(q)
        for tokens, table, context_len in self.rows:
            out[tokens] = attend_row(q[tokens], k_cache, v_cache, table, context_len, scale)
        return out
