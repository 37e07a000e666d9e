"""Qwen3, dense, for inference: a pre-norm transformer over a flat batch of tokens.

    ids: [T] -> embed -> [ norm -> attention -> add, norm -> MLP -> add ] x layers -> norm -> head

`T` counts the tokens of all requests of a step, one after the other; which request a token belongs
to, and where its keys and values go, only `Attention` knows, from the step's `ForwardContext`.
Module names are those of the checkpoint, but for the projections that
`Qwen3ForCausalLM.packed_modules_mapping` merges. Parameters are created uninitialised in torch's
default dtype and device; `nanovllm.utils.loader.load_model` fills them.
"""

from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, ForwardContext, HeadNorms
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.ops import TORCH_OPS, Ops
from nanovllm.layers.parallel import TensorParallel
from nanovllm.layers.rotary_embedding import RotaryEmbedding, Rotation
from nanovllm.layers.weight import ShardId
from nanovllm.models.model_config import ModelConfig


class Qwen3Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head, over this rank's heads."""

    def __init__(self, config: ModelConfig, layer_id: int, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        heads, head_dim = config.num_attention_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            heads,
            config.num_key_value_heads,
            tp,
            config.attention_bias,
            ops,
        )
        self.o_proj = RowParallelLinear(
            heads * head_dim,
            config.hidden_size,
            tp,
            config.attention_bias,
            ops,
            reduce_results=False,
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, ops)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, ops)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            head_dim,
            head_dim**-0.5,
            self.qkv_proj.num_kv_heads,
            layer_id,
        )

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        """`hidden: [T, hidden_size] -> [T, hidden_size]`."""
        norms = HeadNorms(self.q_norm, self.k_norm)
        output: torch.Tensor = self.o_proj(
            self.attn(self.qkv_proj(hidden), norms, rotation, context)
        )
        return output


class Qwen3MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [width, width], tp, ops=ops
        )
        self.down_proj = RowParallelLinear(
            width, config.hidden_size, tp, ops=ops, reduce_results=False
        )
        self.act_fn = SiluAndMul(ops)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden: [T, hidden_size] -> [T, hidden_size]`."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden)))
        return output


class Qwen3DecoderLayer(nn.Module):
    """Attention, then MLP; each reads the norm of the residual stream and adds to the stream.

    The additions are fused with the norm that follows them, so a layer hands on its MLP's output
    and the stream that does not contain it yet.
    """

    def __init__(self, config: ModelConfig, layer_id: int, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, layer_id, tp, ops)
        self.mlp = Qwen3MLP(config, tp, ops)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, tp)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(hidden, residual) -> (hidden, residual)`, all `[T, hidden_size]`.

        The stream is `hidden + residual`; in the first layer `hidden` alone, without a residual.
        """
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, rotation, context)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3Model(nn.Module):
    """The transformer without its head."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, layer_id, tp, ops)
            for layer_id in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, tp)
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.max_position_embeddings, config.rope_theta
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """`input_ids, positions: [T] int64 -> [T, hidden_size]`, normalised."""
        hidden, residual = self.embed_tokens(input_ids), None
        rotation = self.rotary_emb(positions)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation, context)
        normalised: torch.Tensor = self.norm(hidden, residual)[0]
        return normalised


class Qwen3ForCausalLM(nn.Module):
    """Qwen3 with its language-model head.

    Raises ValueError when heads or MLP do not split over `tp.size` ranks (TP-3c).
    """

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ShardId]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, tp: TensorParallel, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config, tp, ops)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, ops)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Final hidden states: `input_ids, positions: [T] int64 -> [T, hidden_size]`.

        Stores the keys and values of all T tokens in the cache that `context` describes.
        """
        hidden: torch.Tensor = self.model(input_ids, positions, context)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden: [R, hidden_size] -> [R, vocab_size]` in the model's dtype, on every rank.

        `R` is the caller's choice of rows: only those that a token is sampled from.
        """
        logits: torch.Tensor = self.lm_head(hidden)
        return logits
