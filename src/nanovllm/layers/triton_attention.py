"""The Triton attention backend, the default on CUDA."""

from functools import cached_property

import torch

from nanovllm.kernels.paged_decode import paged_decode
from nanovllm.kernels.paged_prefill import paged_prefill
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.small_linear import linear
from nanovllm.layers.attention import Attention, ForwardContext, HeadNorms
from nanovllm.layers.backend import AttentionInput, Needs
from nanovllm.layers.ops import Ops
from nanovllm.layers.rotary_embedding import Rotation

FP8_CAPABILITY = (8, 9)
"""First GPUs that have an instruction to convert fp8."""


class TritonContext:
    """Two kernels a layer: one that norms, turns and stores, and one that attends.

    Args:
        kv_cache: [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim].
        inputs: where the tokens go and what the rows attend to.
    """

    def __init__(self, kv_cache: torch.Tensor, inputs: AttentionInput) -> None:
        self.kv_cache = kv_cache
        self.inputs = inputs

    @cached_property
    def arrivals(self) -> torch.Tensor:
        """For all layers, of which one at a time uses it."""
        programs = len(self.inputs.context_lens) * self.kv_cache.shape[-2]
        return self.kv_cache.new_zeros(programs, dtype=torch.int32)

    def attend(
        self, layer: Attention, qkv: torch.Tensor, norms: HeadNorms, rotation: Rotation
    ) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache[0, layer.layer_id], self.kv_cache[1, layer.layer_id]
        q = qk_norm_rope_store(
            qkv,
            norms.q.weight,
            norms.k.weight,
            norms.q.eps,
            rotation.cos_sin,
            rotation.positions,
            self.inputs.slot_mapping,
            k_cache,
            v_cache,
        )
        return self.read(q, k_cache, v_cache, layer.scale).flatten(1)

    def read(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of q [T, num_heads, head_dim] over one layer's cache; returns q's shape."""
        inputs = self.inputs
        tables, rows, lens = inputs.block_tables, inputs.table_rows, inputs.context_lens
        if inputs.max_query_len == 1:
            return paged_decode(
                q, k_cache, v_cache, tables, rows, lens, scale, arrivals=self.arrivals
            )
        return paged_prefill(q, k_cache, v_cache, tables, rows, inputs.cu_seqlens_q, lens, scale)


class TritonBackend:
    """CUDA; float32 (exact products), float16 and bfloat16; any block size."""

    name = "triton"
    default_block_size = 16
    ops = Ops(rms_norm, add_rms_norm, silu_and_mul, linear)
    captures = True

    def check(self, needs: Needs) -> None:
        option = f"attention_backend={self.name!r}"
        if needs.device.type != "cuda":
            raise ValueError(f"{option} needs a CUDA device, not {needs.device.type}")
        if needs.head_dim > 256:
            raise ValueError(
                f"{option} takes head_dim <= 256, got {needs.head_dim}; 'torch' has no limit"
            )
        if needs.kv_dtype.itemsize == 1:
            capability = torch.cuda.get_device_capability(needs.device)
            if capability < FP8_CAPABILITY:
                raise ValueError(
                    f"{option} with kv_cache_dtype='fp8' needs compute capability "
                    f"{FP8_CAPABILITY}, this GPU has {capability}; 'torch' needs none"
                )

    def context(self, kv_cache: torch.Tensor, inputs: AttentionInput) -> ForwardContext:
        return TritonContext(kv_cache, inputs)
