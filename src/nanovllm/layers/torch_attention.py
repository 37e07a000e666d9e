"""The torch attention backend: correct everywhere, made for CPUs, the oracle of all others."""

from abc import ABC, abstractmethod

import torch

from nanovllm.kernels.paged_attention import attend_row
from nanovllm.kernels.store_kvcache import store_kvcache_reference
from nanovllm.layers.attention import Attention, ForwardContext, HeadNorms
from nanovllm.layers.backend import AttentionInput, Needs
from nanovllm.layers.ops import TORCH_OPS, Ops
from nanovllm.layers.rotary_embedding import Rotation


class HeadsContext(ABC):
    """A `ForwardContext` that takes its heads one by one, normed and turned by torch."""

    def attend(
        self, layer: Attention, qkv: torch.Tensor, norms: HeadNorms, rotation: Rotation
    ) -> torch.Tensor:
        q, k, v = layer.heads(qkv, norms, rotation)
        return self.attend_heads(layer.layer_id, q, k, v, layer.scale).flatten(1)

    @abstractmethod
    def attend_heads(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store k and v [T, num_kv_heads, head_dim], then attend with q [T, num_heads, head_dim];
        returns q's shape."""


class TorchContext(HeadsContext):
    """Attends row by row.

    One gather and one SDPA per row: no padding to the longest context, and what is gathered for a
    row stays in the processor's cache until it is used.

    Args:
        kv_cache: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim].
        inputs: where the tokens go and what the rows attend to.
    """

    def __init__(self, kv_cache: torch.Tensor, inputs: AttentionInput) -> None:
        self.kv_cache = kv_cache
        self.slot_mapping = inputs.slot_mapping
        block_size = kv_cache.shape[3]
        bounds = inputs.cu_seqlens_q.tolist()
        tables = inputs.block_tables[inputs.table_rows].long()
        self.rows = [
            (slice(bounds[r], bounds[r + 1]), tables[r, : -(-length // block_size)], length)
            for r, length in enumerate(inputs.context_lens.tolist())
        ]

    def attend_heads(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache[0, layer_id], self.kv_cache[1, layer_id]
        store_kvcache_reference(k, v, k_cache, v_cache, self.slot_mapping)
        out = torch.empty_like(q)
        for tokens, table, context_len in self.rows:
            out[tokens] = attend_row(q[tokens], k_cache, v_cache, table, context_len, scale)
        return out


class TorchBackend:
    """Any device, dtype, block size and head size."""

    name = "torch"
    default_block_size = 16
    ops: Ops = TORCH_OPS
    captures = False

    def check(self, needs: Needs) -> None:
        """It can all."""

    def context(self, kv_cache: torch.Tensor, inputs: AttentionInput) -> ForwardContext:
        return TorchContext(kv_cache, inputs)
