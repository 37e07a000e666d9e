"""The flash-attn backend (FlashAttention-2, Dao 2023), over the same paged cache."""

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from nanovllm.layers.backend import AttentionInput, Needs
from nanovllm.layers.triton_attention import TritonBackend, TritonContext

BLOCK_MULTIPLE = 256
"""Rows of a page that its paged kernels load at once."""


class FlashContext(TritonContext):
    """Stores with our kernel, reads with flash-attn's."""

    def __init__(self, kv_cache: torch.Tensor, inputs: AttentionInput) -> None:
        super().__init__(kv_cache, inputs)
        # Its kernels know no indirection; padding rows read table 0, of which they see nothing.
        self.tables = inputs.block_tables[inputs.table_rows.clamp(min=0)]

    def read(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        inputs = self.inputs
        if inputs.max_query_len == 1:
            out: torch.Tensor = flash_attn_with_kvcache(
                q.unsqueeze(1),
                k_cache,
                v_cache,
                cache_seqlens=inputs.context_lens,
                block_table=self.tables,
                softmax_scale=scale,
                causal=True,
            )
            return out.squeeze(1)
        lengths = inputs.context_lens.cumsum(0, dtype=torch.int32)
        varlen: torch.Tensor = flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k=torch.nn.functional.pad(lengths, (1, 0)),
            max_seqlen_q=inputs.max_query_len,
            max_seqlen_k=inputs.max_context_len,
            softmax_scale=scale,
            causal=True,
            block_table=self.tables,
        )
        return varlen


class FlashBackend(TritonBackend):
    """CUDA; float16 and bfloat16; blocks of a multiple of 256 tokens."""

    name = "flash_attn"
    default_block_size = BLOCK_MULTIPLE

    def check(self, needs: Needs) -> None:
        option = f"attention_backend={self.name!r}"
        if needs.kv_dtype != needs.dtype:
            raise ValueError(
                f"{option} keeps keys and values in {needs.dtype}, not {needs.kv_dtype}; "
                "'triton' and 'torch' take kv_cache_dtype='fp8'"
            )
        super().check(needs)
        if needs.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{option} computes in float16 or bfloat16, not {needs.dtype}; "
                "'triton' and 'torch' take float32"
            )
        if needs.block_size % BLOCK_MULTIPLE:
            raise ValueError(
                f"{option} needs kvcache_block_size to be a multiple of {BLOCK_MULTIPLE}, got "
                f"{needs.block_size}; 'triton' and 'torch' take any"
            )
        if needs.head_dim % 8:
            raise ValueError(f"{option} takes multiples of 8 as head_dim, got {needs.head_dim}")

    def context(self, kv_cache: torch.Tensor, inputs: AttentionInput) -> FlashContext:
        return FlashContext(kv_cache, inputs)
