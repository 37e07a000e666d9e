"""Random Qwen3 checkpoints on disk, for our engine and HF transformers alike.

Weights of the usual N(0, 0.02) make every position a near tie, and a token-for-token comparison
ends after a token or two. Here each projection's standard deviation is a gain over the square root
of its fan-in, so that attention and MLP, not the embedding of the last token, decide the next
token. `tests/unit/test_qwen3.py` holds greedy decoding to what this is for.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_checkpoint(
    path: str | Path,
    *,
    seed: int = 0,
    vocab_size: int = 300,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    tie_word_embeddings: bool = True,
    attention_bias: bool = False,
    max_position_embeddings: int = 512,
    rope_theta: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
    eos_token_id: int | list[int] | None = None,
    scale: float = 1.0,
    num_shards: int = 1,
    tokenizer: bool = False,
) -> Path:
    """Writes config.json and safetensors into directory `path`, and returns it.

    `scale` multiplies the logits. `num_shards > 1` writes that many files and their index.
    `tokenizer` adds a byte-level one, ids 0..255 the bytes and 256 its end of text.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tie_word_embeddings,
        "attention_bias": attention_bias,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "hidden_act": "silu",
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = random_weights(config, seed=seed, scale=scale)
    save_tensors(directory, {name: t.to(dtype) for name, t in tensors.items()}, num_shards)
    if tokenizer:
        save_byte_tokenizer(directory, vocab_size)
    return directory


def random_weights(config: dict, *, seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, float32, under its name in the file."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float) -> None:
        noise = torch.randn(rows, columns, generator=generator)
        tensors[f"{name}.weight"] = noise * gain / columns**0.5

    def vector(name: str, size: int, mean: float, std: float) -> None:
        tensors[name] = mean + std * torch.randn(size, generator=generator)

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    matrix("model.embed_tokens", config["vocab_size"], hidden, 1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        vector(f"{prefix}.input_layernorm.weight", hidden, 1.0, 0.1)
        vector(f"{prefix}.post_attention_layernorm.weight", hidden, 1.0, 0.1)
        vector(f"{attention}.q_norm.weight", dim, 1.5, 0.1)
        vector(f"{attention}.k_norm.weight", dim, 1.5, 0.1)
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        for part, size in sizes.items():
            matrix(f"{attention}.{part}", size, hidden, 1.0)
        matrix(f"{attention}.o_proj", hidden, q_size, 2.0)
        if config["attention_bias"]:
            for part, size in {**sizes, "o_proj": hidden}.items():
                vector(f"{attention}.{part}.bias", size, 0.0, 0.3)
        matrix(f"{prefix}.mlp.gate_proj", inner, hidden, 1.5)
        matrix(f"{prefix}.mlp.up_proj", inner, hidden, 1.5)
        matrix(f"{prefix}.mlp.down_proj", hidden, inner, 2.0)
    vector("model.norm.weight", hidden, scale, 0.1 * scale)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden, 1.0)
    return tensors


def save_tensors(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """model.safetensors, or `num_shards` files with an index."""
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def save_byte_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer without merges: one token per UTF-8 byte, and an end of text."""
    if vocab_size < 257:
        raise ValueError(f"256 bytes and an end of text need a vocabulary >= 257, got {vocab_size}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token for token, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
