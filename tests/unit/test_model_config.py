"""config.json of transformers 4 and 5: what is read, and what is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from nanovllm.models.model_config import Architecture, ModelConfig
from nanovllm.models.registry import MODEL_CLASSES

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": 5,
}


def write(directory: Path, changes: dict, generation: dict | None = None, drop=()) -> Path:
    config = {k: v for k, v in {**BASE, **changes}.items() if k not in drop}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.spec("LOD-4")
def test_every_field_is_read(tmp_path):
    assert ModelConfig.from_pretrained(write(tmp_path, {})) == ModelConfig(
        architecture=Architecture.QWEN3,
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
        attention_bias=False,
        dtype=torch.bfloat16,
        eos_token_ids=frozenset({5}),
    )


@pytest.mark.spec("LOD-4")
@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_dtype_of_transformers_4_and_5(tmp_path, fields, dtype):
    if "dtype" not in fields:
        write(tmp_path, fields, drop=["dtype"])
    else:
        write(tmp_path, fields)
    assert ModelConfig.from_pretrained(tmp_path).dtype == dtype


@pytest.mark.spec("LOD-4", "MOD-4")
@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": None}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}}, 1e6),
        ({}, 1e4),
    ],
)
def test_b91_rope_theta_is_the_one_transformers_reads(tmp_path, fields, theta):
    drop = [] if "rope_parameters" in fields else ["rope_parameters"]
    write(tmp_path, fields, drop=drop)
    assert ModelConfig.from_pretrained(tmp_path).rope_theta == theta
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == theta


@pytest.mark.spec("LOD-5")
@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e6}}, "full_attention"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}, "'yarn'"),
        ({"type": "linear", "factor": 2.0}, "'linear'"),
        ({"rope_type": "made_up"}, "'made_up'"),
    ],
)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_b91_other_rope_types_are_refused_by_name(tmp_path, field, rope, name):
    write(tmp_path, {field: rope})
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.spec("LOD-5")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*supported: Qwen3ForCausalLM"),
        ({"architectures": []}, "supported: Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"quantization_config": {"bits": 4}}, "quantisation"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'.*float32, float16, bfloat16"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(write(tmp_path, changes))


@pytest.mark.spec("LOD-4")
@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(tmp_path, changes):
    write(tmp_path, changes)
    assert AutoConfig.from_pretrained(tmp_path).layer_types == ["full_attention"] * 2
    assert ModelConfig.from_pretrained(tmp_path).num_hidden_layers == 2


@pytest.mark.spec("STP-1")
@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (5, {"eos_token_id": [5, 9]}, {5, 9}),
        ([5, 7], {"eos_token_id": 9}, {5, 7, 9}),
        (5, {"eos_token_id": None}, {5}),
        (None, {"eos_token_id": 9}, {9}),
        (0, {}, {0}),
        (5, None, {5}),
        ([], None, set()),
        (None, None, set()),
    ],
)
def test_b80_eos_ids_are_the_union_of_both_files(tmp_path, config_eos, generation, expected):
    write(tmp_path, {"eos_token_id": config_eos}, generation)
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == expected


@pytest.mark.spec("STP-1")
@pytest.mark.parametrize("eos", ["5", [5, None], -1, [[5]]])
def test_eos_ids_that_are_no_ids_are_refused(tmp_path, eos):
    write(tmp_path, {}, {"eos_token_id": eos})
    with pytest.raises(ValueError, match="eos_token_id"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.spec("MOD-6")
@pytest.mark.parametrize("changes", [{"head_dim": None}, {}])
def test_head_dim_defaults_to_the_hidden_sizes_share(tmp_path, changes):
    write(tmp_path, changes, drop=[] if changes else ["head_dim"])
    assert ModelConfig.from_pretrained(tmp_path).head_dim == 48 // 4


@pytest.mark.spec("CFG-1")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size .* 0"),
        ({"hidden_size": -48}, "hidden_size .* -48"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers .* 2\.0"),
        ({"head_dim": 0}, "head_dim .* 0"),
        ({"head_dim": 15}, "head_dim .* 15"),
        ({"head_dim": None, "hidden_size": 50}, "50 .* 4 heads"),
        ({"head_dim": None, "num_attention_heads": 0}, "num_attention_heads .* 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 .* num_key_value_heads = 3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps .* 0"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"rope_theta .* -1\.0"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_numbers_that_make_no_model_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_pretrained(write(tmp_path, changes))


@pytest.mark.spec("LOD-1")
def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no/such/model is not a directory"):
        ModelConfig.from_pretrained("no/such/model")
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    for text, message in [("{", "is not JSON"), ("[]", "holds a list")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_pretrained(tmp_path)


@pytest.mark.spec("LOD-5")
def test_every_architecture_that_parses_has_a_class():
    assert set(MODEL_CLASSES) == set(Architecture)
