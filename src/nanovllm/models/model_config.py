"""What a checkpoint directory says about its model: config.json and generation_config.json.

Plain JSON of transformers 4 or 5 (LOD-4). Whatever would make this engine compute something else
than the checkpoint means is refused by name (LOD-5), never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

RawConfig = Mapping[str, Any]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Architecture(StrEnum):
    """The architectures that the engine knows, as `architectures` in config.json names them."""

    QWEN3 = "Qwen3ForCausalLM"


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer; sizes are those of the whole model.

    `eos_token_ids` is the union over config.json and generation_config.json (STP-1).
    Raises ValueError for sizes that are not positive integers or do not fit together.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: torch.dtype
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            _check_size(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number > 0, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """The configuration of the checkpoint in directory `path`.

        Raises FileNotFoundError without the directory or its config.json, and ValueError for what
        the engine does not support.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise FileNotFoundError(
                f"{directory} is not a directory; a model is a local directory with config.json "
                "and safetensors files (nothing is downloaded)"
            )
        raw = _read_json(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        heads = _required(raw, "num_attention_heads")
        return cls(
            architecture=architecture,
            vocab_size=_required(raw, "vocab_size"),
            hidden_size=_required(raw, "hidden_size"),
            intermediate_size=_required(raw, "intermediate_size"),
            num_hidden_layers=_required(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_optional(raw, "num_key_value_heads", heads),
            head_dim=_head_dim(raw),
            max_position_embeddings=_required(raw, "max_position_embeddings"),
            rms_norm_eps=_optional(raw, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            tie_word_embeddings=_optional(raw, "tie_word_embeddings", False),
            attention_bias=_optional(raw, "attention_bias", False),
            dtype=_dtype(raw),
            eos_token_ids=_eos_token_ids(raw) | _eos_token_ids(generation),
        )


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{name} must be an integer > 0, got {value!r}")


def _read_json(file: Path) -> RawConfig:
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}, not an object")
    return raw


def _required(raw: RawConfig, name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"config.json lacks {name}")
    return raw[name]


def _optional(raw: RawConfig, name: str, default: Any) -> Any:
    value = raw.get(name)
    return default if value is None else value


def _architecture(raw: RawConfig) -> Architecture:
    names = _required(raw, "architectures")
    if len(names) != 1 or names[0] not in list(Architecture):
        supported = ", ".join(Architecture)
        raise ValueError(f"architecture {names} is not supported; supported: {supported}")
    return Architecture(names[0])


def _refuse_unsupported(raw: RawConfig) -> None:
    quantisation = raw.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", "unnamed")
        raise ValueError(f"quantisation is not supported; the checkpoint uses {method!r}")
    activation = _optional(raw, "hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: 'silu'")
    special = _layer_types(raw) - {"full_attention"}
    if special:
        raise ValueError(
            f"layers of {', '.join(sorted(special))} are not supported; supported: full_attention"
        )


def _layer_types(raw: RawConfig) -> set[str]:
    """The kinds of attention in use; older configs imply them by the fields of a window."""
    explicit = raw.get("layer_types")
    if explicit is not None:
        return set(explicit)
    windowed = raw.get("use_sliding_window", False) and raw.get("sliding_window", True) is not None
    first_windowed = _optional(raw, "max_window_layers", 28)
    if windowed and first_windowed < _required(raw, "num_hidden_layers"):
        return {"full_attention", "sliding_attention"}
    return {"full_attention"}


def _head_dim(raw: RawConfig) -> int:
    explicit: int | None = raw.get("head_dim")
    if explicit is not None:
        return explicit
    hidden: int = _required(raw, "hidden_size")
    heads: int = _required(raw, "num_attention_heads")
    _check_size("num_attention_heads", heads)
    if hidden % heads:
        raise ValueError(f"no head_dim, and hidden_size {hidden} does not split over {heads} heads")
    return hidden // heads


def _rope_theta(raw: RawConfig) -> float:
    """`rope_theta`: at the top level (transformers 4) or in `rope_parameters` (transformers 5)."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    nested = [layer_type for layer_type, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"rope parameters per layer type ({', '.join(nested)}) are not supported")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: 'default'")
    theta: float = rope.get("rope_theta", _optional(raw, "rope_theta", 10_000.0))
    return theta


def _dtype(raw: RawConfig) -> torch.dtype:
    """`dtype` (transformers 5) or `torch_dtype` (transformers 4); float32 when neither is given."""
    name = _optional(raw, "dtype", _optional(raw, "torch_dtype", "float32"))
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(raw: RawConfig) -> frozenset[int]:
    """The field is an id, a list of ids, null, or absent."""
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id must be token ids, got {value!r}")
    return frozenset(ids)
