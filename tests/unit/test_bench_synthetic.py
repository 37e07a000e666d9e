"""Synthetic checkpoints: exact shapes, loadable by anybody, the same every time."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.bench import synthetic
from nanovllm.bench.synthetic import CHOICE_PERIOD, SHAPES, model_directory, write_checkpoint
from nanovllm.models.model_config import ModelConfig

SMALL = {
    "vocab_size": 1000,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.spec("MOD-1")
@pytest.mark.parametrize(
    ("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)]
)
def test_shapes_are_those_of_the_real_models(name: str, parameters: int, tmp_path: Path) -> None:
    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = ModelConfig.from_pretrained(tmp_path)
    hidden, dim, inner = config.hidden_size, config.head_dim, shape["intermediate_size"]
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = hidden * (2 * q + 2 * kv + 3 * inner + 2) + 2 * dim
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    assert tables + config.num_hidden_layers * layer + hidden == parameters
    assert (config.rope_theta, config.rms_norm_eps) == (1e6, 1e-6)


@pytest.mark.spec("LOD-1", "LOD-3")
@pytest.mark.parametrize("tied", [True, False])
def test_it_loads_and_runs(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "SHARD_BYTES", 200_000)
    shape = SHAPES["qwen3-8b"] | SMALL | {"tie_word_embeddings": tied}
    write_checkpoint(tmp_path, shape)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(tmp_path, num_kvcache_blocks=16) as llm:
        (output,) = llm.generate([[CHOICE_PERIOD * 3 + 5]], params, use_tqdm=False)
    first = list(range(CHOICE_PERIOD * 3 + 6, CHOICE_PERIOD * 4 + 1))
    assert output.token_ids[: len(first)] == first, "successors up to the next choice"


@pytest.mark.spec("MOD-1")
def test_it_is_the_same_every_time(tmp_path: Path) -> None:
    once, again, other = (
        tensors(write_checkpoint(_new(tmp_path / str(i)), SHAPES["qwen3-0.6b"] | SMALL, seed))
        for i, seed in enumerate((0, 0, 1))
    )
    assert once.keys() == again.keys() == other.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not torch.equal(once["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.spec("MOD-1")
def test_a_shape_without_room_for_successors_is_refused(tmp_path: Path) -> None:
    shape = SHAPES["qwen3-0.6b"] | SMALL | {"intermediate_size": 64}
    with pytest.raises(ValueError, match="intermediate_size 64 is below hidden_size 256"):
        write_checkpoint(tmp_path, shape)


def test_a_name_is_a_directory_for_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SHAPES["qwen3-0.6b"] | SMALL)
    with model_directory("synthetic:small") as directory:
        assert ModelConfig.from_pretrained(directory).vocab_size == 1000
    assert not directory.exists()
    with model_directory("some/where") as directory:
        assert directory == Path("some/where")
    with pytest.raises(ValueError, match="synthetic:qwen3-8b"), model_directory("synthetic:9b"):
        pass


def _new(path: Path) -> Path:
    path.mkdir()
    return path
