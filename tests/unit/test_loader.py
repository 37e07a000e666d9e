"""Loading: every parameter exactly once, from exactly the file the index says (B88, B89)."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, save_tensors

from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.loader import load_model

SMALL = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4}


def build(path: Path) -> Qwen3ForCausalLM:
    """The model with every parameter NaN, so that an untouched one shows."""
    model = Qwen3ForCausalLM(ModelConfig.from_pretrained(path), TensorParallel())
    for param in model.parameters():
        param.fill_(torch.nan)
    return model


def unpacked(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of the checkpoint."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name in list(tensors):
        if "qkv_proj" in name:
            parts = torch.split(tensors[name], model.model.layers[0].self_attn.qkv_proj.part_sizes)
            packed, names = "qkv_proj", ("q_proj", "k_proj", "v_proj")
        elif "gate_up_proj" in name:
            parts = torch.chunk(tensors[name], 2)
            packed, names = "gate_up_proj", ("gate_proj", "up_proj")
        else:
            continue
        del tensors[name]
        tensors.update(zip((name.replace(packed, n) for n in names), parts, strict=True))
    return tensors


def assert_loaded(model: Qwen3ForCausalLM, expected: dict[str, torch.Tensor]) -> None:
    actual = unpacked(model)
    for name, tensor in expected.items():
        assert torch.equal(actual.pop(name), tensor), name
    assert set(actual) <= {"lm_head.weight"}


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as refused:
        load_model(build(path), path)
    return str(refused.value)


@pytest.mark.spec("LOD-1", "LOD-2", "MOD-5", "MOD-8")
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_tensor_arrives_where_it_belongs(tmp_path, num_shards, tied, bias):
    options = {**SMALL, "tie_word_embeddings": tied, "attention_bias": bias}
    expected = tensors_of(make_checkpoint(tmp_path / "single", **options))
    path = make_checkpoint(tmp_path / "sharded", num_shards=num_shards, **options)
    model = build(path)
    load_model(model, path)
    assert_loaded(model, expected)


@pytest.mark.spec("LOD-2")
def test_weights_are_cast_to_the_models_dtype(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL)
    model = build(path).bfloat16()
    load_model(model, path)
    assert_loaded(model, {name: t.bfloat16() for name, t in tensors_of(path).items()})


@pytest.mark.spec("LOD-2")
def test_b88_each_missing_tensor_is_named(tmp_path):
    path = make_checkpoint(
        tmp_path, **SMALL, num_hidden_layers=1, tie_word_embeddings=False, attention_bias=True
    )
    tensors = tensors_of(path)
    for name in tensors:
        save_tensors(path, {n: t for n, t in tensors.items() if n != name})
        message = refusal(path)
        assert f"{name} is missing" in message
        assert message.count("is missing") == 1


@pytest.mark.spec("LOD-2")
def test_b88_each_mis_shaped_tensor_is_named_with_both_shapes(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL, num_hidden_layers=1, attention_bias=True)
    tensors = tensors_of(path)
    for name, tensor in tensors.items():
        wrong = torch.zeros(tensor.size(0) + 1, *tensor.shape[1:])
        save_tensors(path, {**tensors, name: wrong})
        message = refusal(path)
        assert name in message
        assert str(tuple(wrong.shape)) in message
        assert str(tuple(tensor.shape)) in message


@pytest.mark.spec("LOD-2")
def test_b88_an_unknown_tensor_is_an_error_or_on_request_a_warning(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL)
    tensors = tensors_of(path)
    extra = {"model.layers.2.mlp.up_proj.weight": torch.zeros(1), "head.bias": torch.zeros(1)}
    save_tensors(path, {**tensors, **extra})
    message = refusal(path)
    assert all(f"{name} is not a tensor of the model" in message for name in extra)
    model = build(path)
    with pytest.warns(UserWarning, match=r"head\.bias, model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(model, path, unexpected="warn")
    assert_loaded(model, tensors)


@pytest.mark.spec("LOD-2")
def test_all_problems_come_in_one_message(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL)
    tensors = tensors_of(path)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    tensors["model.layers.0.self_attn.q_norm.bias"] = torch.zeros(4)
    save_tensors(path, tensors)
    assert refusal(path).splitlines()[1:] == [
        "  model.layers.0.self_attn.k_proj.weight is missing",
        "  model.norm.weight is missing",
        "  model.layers.0.self_attn.q_norm.bias is not a tensor of the model",
        "  model.layers.1.mlp.up_proj.weight has shape (3, 3), the model expects (12, 8)",
    ]


@pytest.mark.spec("LOD-2", "LOD-3", "MOD-5")
def test_a_tied_head_and_inverse_frequencies_may_be_in_the_file(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL)
    tensors = tensors_of(path)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    save_tensors(path, {**tensors, **extra})
    model = build(path)
    with warnings.catch_warnings(action="error"):
        load_model(model, path)
        load_model(model, path, unexpected="warn")
    assert_loaded(model, tensors)


@pytest.mark.spec("LOD-3", "MOD-5")
def test_an_untied_model_needs_its_head(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "lm_head.weight is missing" in refusal(path)


@pytest.mark.spec("LOD-1")
def test_b89_the_index_decides_for_each_tensor(tmp_path):
    expected = tensors_of(make_checkpoint(tmp_path / "single", **SMALL))
    path = make_checkpoint(tmp_path / "sharded", **SMALL, num_shards=2)
    first, second = sorted(path.glob("*.safetensors"))
    stale = next(iter(load_file(first)))
    save_file({**load_file(second), stale: torch.zeros_like(expected[stale])}, second)
    zeros = {name: torch.zeros_like(t) for name, t in expected.items()}
    save_file(zeros | {"unknown": torch.zeros(1)}, path / "model-00003-of-00003.safetensors")
    save_file(zeros, path / "model.safetensors")
    model = build(path)
    load_model(model, path)
    assert_loaded(model, expected)


@pytest.mark.spec("LOD-1")
def test_b89_an_index_that_names_a_missing_file_is_an_error(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL, num_shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        load_model(build(path), path)


@pytest.mark.spec("LOD-1", "LOD-2")
def test_a_tensor_that_is_not_where_the_index_places_it_is_named(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL, num_shards=2)
    first, _ = sorted(path.glob("*.safetensors"))
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file({n: t for n, t in tensors.items() if n != name}, first)
    assert f"{name} is missing from {first.name}" in refusal(path)


@pytest.mark.spec("LOD-1")
def test_a_directory_without_weights_is_an_error(tmp_path):
    path = make_checkpoint(tmp_path, **SMALL)
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(build(path), path)
