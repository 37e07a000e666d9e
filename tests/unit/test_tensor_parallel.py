"""Tensor parallelism over real processes (gloo), and the shards of a whole model."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from tiny_models import make_checkpoint
from tp_worker import forward, run_rank

from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.loader import load_model

CHECKPOINTS = {
    "plain": {"num_key_value_heads": 4, "num_attention_heads": 8},
    "odd_vocabulary_untied": {"vocab_size": 301, "tie_word_embeddings": False},
    "one_kv_head_with_bias": {"num_key_value_heads": 1, "attention_bias": True, "vocab_size": 299},
}
LAYERS = 2
HIDDEN = 64
IDS = torch.randint(299, (40,), generator=torch.Generator().manual_seed(0))

Results = dict[str, tuple[torch.Tensor, list[tuple[int, ...]]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, seed=2, **c) for name, c in CHECKPOINTS.items()}


@pytest.fixture(scope="module")
def run(checkpoints, tmp_path_factory) -> Callable[[int], list[Results]]:
    """The results of every rank of a group of `size` processes, which runs all checkpoints."""
    # Ranks fork from a process that has imported torch, instead of each importing it anew.
    mp.set_forkserver_preload(["nanovllm.models.qwen3", "nanovllm.utils.loader"])

    @cache
    def run_group(size: int) -> list[Results]:
        rendezvous = tmp_path_factory.mktemp("group") / "ranks"
        paths = list(checkpoints.values())
        args = (size, rendezvous, paths, IDS)
        mp.start_processes(run_rank, args, nprocs=size, start_method="forkserver")
        return [torch.load(rendezvous.with_suffix(f".{rank}")) for rank in range(size)]

    return run_group


@pytest.mark.spec("TP-1", "TP-3a", "TP-3b", "TP-6")
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_logits_of_a_single_process(run, checkpoints, size, name):
    expected = forward(checkpoints[name], IDS, TensorParallel())
    assert expected.std() > 0.5
    for results in run(size):
        logits, _ = results[name]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert torch.equal(logits, run(size)[0][name][0])


@pytest.mark.spec("TP-7")
@pytest.mark.parametrize("size", [2, 4])
def test_two_all_reduces_a_layer_and_one_for_the_embedding(run, size):
    for results in run(size):
        for _, reduced in results.values():
            assert reduced == [(len(IDS), HIDDEN)] * (2 * LAYERS + 1)


@pytest.mark.spec("TP-6", "TP-3a", "TP-3b")
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_shards_concatenate_to_the_checkpoint(checkpoints, size, name):
    path = checkpoints[name]
    config = ModelConfig.from_pretrained(path)
    ranks = []
    for rank in range(size):
        model = Qwen3ForCausalLM(config, TensorParallel(rank, size))
        load_model(model, path)
        ranks.append(model)
    replicas = max(1, size // config.num_key_value_heads)
    for full_name, full in load_file(path / "model.safetensors").items():
        shards = [shard_of(model, full_name) for model in ranks]
        if "norm" in full_name or full_name.endswith("o_proj.bias"):
            assert all(torch.equal(shard, full) for shard in shards), full_name
            continue
        if "k_proj" in full_name or "v_proj" in full_name:
            for rank, shard in enumerate(shards):
                assert torch.equal(shard, shards[rank - rank % replicas]), full_name
            shards = shards[::replicas]
        row_parallel = "o_proj" in full_name or "down_proj" in full_name
        whole = torch.cat(shards, dim=1 if row_parallel else 0)
        assert torch.equal(whole[: len(full)], full), full_name
        assert not whole[len(full) :].any(), full_name


def shard_of(model: Qwen3ForCausalLM, full_name: str) -> torch.Tensor:
    """What a rank holds of one tensor of the checkpoint."""
    *parents, module, leaf = full_name.split(".")
    packed, shard_id = model.packed_modules_mapping.get(module, (module, None))
    layer = model.get_submodule(".".join([*parents, packed]))
    tensor = getattr(layer, leaf)
    if shard_id is None:
        return tensor
    part = "qkv".index(shard_id) if isinstance(shard_id, str) else shard_id
    return torch.split(tensor, layer.part_sizes)[part]


@pytest.mark.spec("TP-3c")
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "num_attention_heads = 6 .* 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, "num_key_value_heads = 3 .* 4"),
        ({"intermediate_size": 130}, "output_size = 130 .* 4"),
    ],
)
def test_a_model_that_cannot_split_is_refused_with_its_numbers(tmp_path, shape, message):
    config = ModelConfig.from_pretrained(make_checkpoint(tmp_path, **shape))
    with pytest.raises(ValueError, match=message):
        Qwen3ForCausalLM(config, TensorParallel(0, 4))
