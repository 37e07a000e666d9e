"""Checkpoints of real shapes with made-up weights, for hosts that have no weights.

Weights of the usual N(0, 0.02) make every position a near tie: a token-for-token comparison in
bfloat16 ends after a token or two and shows nothing. Here almost every token has one successor,
with a wide margin, and one in `CHOICE_PERIOD` leaves the choice of the next to the whole context:

- *Successors.* The embedding of token `t = g * (hidden - 1) + s` is the random vector of group `g`,
  rolled by `s`. A roll by one more is thus one linear map that takes every token to its successor,
  `t + 1`. The MLP of the last layer is that map, and exact: its matrices hold one 1 a row.
- *Choices.* Coordinate 0 of the embedding, which no layer writes, is a flag that gates this MLP.
  After a token with the flag down, the logits are those of a random network over all it attends
  to: every layer's keys, values and MLP decide. Embeddings differ in length, exponentially, so
  that the best of many random logits stand apart.
- The final norm's weight has random signs, or a tied head would answer each token with itself.

`tests/equality/test_synthetic.py` holds the outputs to what this is for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PREFIX = "synthetic:"
CHOICE_PERIOD = 97
FLAG = 8.0
LENGTH_SPREAD = 0.2
# Gains of random projections: standard deviation times the square root of the fan-in. What all
# layers add together does not depend on their number. The MLPs add little, since what they do to
# the roundings of bfloat16 grows from layer to layer.
ATTENTION_GAIN, MLP_GAIN, QK_NORM = 3.0, 0.5, 1.25
SUCCESSOR_GAIN = 4.0
LOGIT_SCALE = 0.5  # of a standard deviation of 1 after a choice, or somewhat more
SHARD_BYTES = 4 << 30
END_OF_TEXT = "<|endoftext|>"

Shape = dict[str, Any]
Weights = Iterator[tuple[str, torch.Tensor]]

_QWEN3: Shape = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": _QWEN3
    | {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


@contextmanager
def model_directory(model: str | Path) -> Iterator[Path]:
    """The directory of a model; `synthetic:NAME` is made for as long as it is needed.

    Raises ValueError for a NAME that is none of `SHAPES`.
    """
    name = str(model)
    if not name.startswith(PREFIX):
        yield Path(model)
        return
    shape = SHAPES.get(name.removeprefix(PREFIX))
    if shape is None:
        known = ", ".join(PREFIX + known for known in SHAPES)
        raise ValueError(f"no synthetic model {name!r}; there are {known}")
    with tempfile.TemporaryDirectory(prefix="nanovllm-") as directory:
        yield write_checkpoint(Path(directory), shape)


def write_checkpoint(directory: Path, shape: Shape, seed: int = 0) -> Path:
    """Writes config.json, a tokenizer without words and bfloat16 weights; returns `directory`.

    The weights are drawn where that is fast: the same each time, but not the same on CUDA as on a
    CPU. Raises ValueError if `shape` has no room for the successors.
    """
    if shape["intermediate_size"] < shape["hidden_size"]:
        raise ValueError(
            f"intermediate_size {shape['intermediate_size']} is below hidden_size "
            f"{shape['hidden_size']}: the last MLP cannot hold the map to the successors"
        )
    (directory / "config.json").write_text(json.dumps(shape, indent=2))
    _write_tokenizer(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(_Weights(shape, seed, device).all())):
        file = f"model-{number:05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _write_tokenizer(directory: Path) -> None:
    """Other engines want one, whether or not they use it."""
    words = Tokenizer(WordLevel({END_OF_TEXT: 0}, unk_token=END_OF_TEXT))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END_OF_TEXT).save_pretrained(
        directory
    )


def _shards(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Groups of tensors of about `SHARD_BYTES`, on the CPU."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        shard[name] = tensor.to("cpu", torch.bfloat16).contiguous()
        size += shard[name].nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


class _Weights:
    """The tensors of one checkpoint, in the order in which they are drawn."""

    def __init__(self, shape: Shape, seed: int, device: str) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.signs = torch.sign(self._normal(shape["hidden_size"]))

    def all(self) -> Weights:
        embeddings = self._embeddings()
        yield "model.embed_tokens.weight", embeddings
        if not self.shape["tie_word_embeddings"]:
            yield "lm_head.weight", embeddings.clone()
        del embeddings
        last = self.shape["num_hidden_layers"] - 1
        for layer in range(last + 1):
            prefix = f"model.layers.{layer}"
            yield from self._attention(prefix)
            yield from self._successors(prefix) if layer == last else self._mlp(prefix)
        norm = LOGIT_SCALE * self.signs / self.shape["hidden_size"] ** 0.5
        norm[0] = 0
        yield "model.norm.weight", norm

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device=self.device)

    def _matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return self._normal(rows, columns).mul_(gain / columns**0.5)

    def _embeddings(self) -> torch.Tensor:
        """Row `g * m + s` is group g's vector rolled by s, and a flag before it."""
        vocab_size, m = self.shape["vocab_size"], self.shape["hidden_size"] - 1
        steps = torch.arange(m, device=self.device)
        rolled = (steps[None, :] - steps[:, None]) % m
        groups = self._normal(-(-vocab_size // m), m)
        vectors = groups[:, rolled].flatten(0, 1)[:vocab_size]
        uniform = torch.rand(vocab_size, 1, generator=self.generator, device=self.device)
        lengths = 1 - LENGTH_SPREAD * torch.log1p(-uniform)
        tokens = torch.arange(vocab_size, device=self.device)[:, None]
        flags = torch.where(tokens % CHOICE_PERIOD == 0, -FLAG, FLAG)
        return torch.cat((flags, vectors.mul_(lengths)), dim=1).to(torch.bfloat16)

    def _attention(self, prefix: str) -> Weights:
        shape, attention = self.shape, f"{prefix}.self_attn"
        hidden, dim = shape["hidden_size"], shape["head_dim"]
        q_size, kv_size = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
        yield f"{prefix}.input_layernorm.weight", 1 + 0.1 * self._normal(hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{attention}.{name}.weight", QK_NORM + 0.1 * self._normal(dim)
        yield f"{attention}.q_proj.weight", self._matrix(q_size, hidden)
        yield f"{attention}.k_proj.weight", self._matrix(kv_size, hidden)
        yield f"{attention}.v_proj.weight", self._matrix(kv_size, hidden)
        yield f"{attention}.o_proj.weight", self._keep_flag(hidden, q_size, ATTENTION_GAIN)

    def _mlp(self, prefix: str) -> Weights:
        hidden, inner = self.shape["hidden_size"], self.shape["intermediate_size"]
        yield f"{prefix}.post_attention_layernorm.weight", 1 + 0.1 * self._normal(hidden)
        yield f"{prefix}.mlp.gate_proj.weight", self._matrix(inner, hidden, gain=1.5)
        yield f"{prefix}.mlp.up_proj.weight", self._matrix(inner, hidden, gain=1.5)
        yield f"{prefix}.mlp.down_proj.weight", self._keep_flag(hidden, inner, MLP_GAIN)

    def _keep_flag(self, hidden: int, columns: int, gain: float) -> torch.Tensor:
        matrix = self._matrix(hidden, columns, gain / self.shape["num_hidden_layers"] ** 0.5)
        matrix[0] = 0
        return matrix

    def _successors(self, prefix: str) -> Weights:
        """`silu(flag) * roll(x)`, with the signs that the final norm takes back."""
        hidden, inner = self.shape["hidden_size"], self.shape["intermediate_size"]
        m = hidden - 1
        gate, up = torch.zeros(2, inner, hidden, device=self.device)
        down = torch.zeros(hidden, inner, device=self.device)
        neurons = torch.arange(m, device=self.device)
        gate[neurons, 0] = 1
        up[neurons, 1 + neurons] = 1
        targets = 1 + (neurons + 1) % m
        down[targets, neurons] = SUCCESSOR_GAIN * self.signs[targets]
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(hidden, device=self.device)
        yield f"{prefix}.mlp.gate_proj.weight", gate
        yield f"{prefix}.mlp.up_proj.weight", up
        yield f"{prefix}.mlp.down_proj.weight", down
