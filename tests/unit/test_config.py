"""Options of `LLM`: which there are, and what is refused (CFG, API-3)."""

from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.config import Config


@pytest.mark.spec("API-3")
def test_unknown_option_lists_the_valid_ones(checkpoint: Path) -> None:
    with pytest.raises(TypeError) as raised:
        LLM(checkpoint, max_seqs=3)
    assert "max_seqs" in str(raised.value)
    valid = {f.name for f in fields(Config)} - {"model"}
    assert all(name in str(raised.value) for name in valid)


@pytest.mark.spec("CFG-1")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, ["4", "8"]),
        ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization", "0"]),
        ({"gpu_memory_utilization": 1.01}, ["1.01"]),
        ({"max_model_len": -1}, ["max_model_len", "-1"]),
        ({"kvcache_block_size": 0}, ["kvcache_block_size", "0"]),
        ({"num_kvcache_blocks": 0}, ["num_kvcache_blocks", "0"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size", "0"]),
        ({"data_parallel_size": 0}, ["data_parallel_size", "0"]),
        ({"data_parallel_size": 2, "trace": "t.jsonl"}, ["t.jsonl", "data_parallel_size=2"]),
        ({"scheduling_policy": "random"}, ["random", "prefill_first", "mixed"]),
        ({"device": "tpu"}, ["tpu", "cuda"]),
        ({"kvcache_memory_gb": 0}, ["kvcache_memory_gb"]),
        ({"kvcache_memory_gb": 1e-9}, ["kvcache_memory_gb", "needs"]),
    ],
)
def test_bad_options_are_refused_with_their_values(checkpoint: Path, options, words) -> None:
    with pytest.raises(ValueError) as raised:
        LLM(checkpoint, **options)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.spec("CFG-1")
def test_options_of_the_wrong_type(checkpoint: Path) -> None:
    for name, values in {
        "max_num_seqs": ("8", 8.0, True),
        "data_parallel_size": ("2", 2.0, True),
        "enable_prefix_caching": ("no", 0, None),
        "enforce_eager": ("maybe",),
        "gpu_memory_utilization": ("0.5", True),
        "kvcache_memory_gb": ("1",),
        "seed": ("x", 1.5, True),
    }.items():
        for value in values:
            with pytest.raises(TypeError, match=name):
                LLM(checkpoint, **{name: value})


@pytest.mark.spec("CFG-3")
def test_the_default_block_size_is_documented(checkpoint: Path) -> None:
    with LLM(checkpoint) as engine:
        assert engine.model_runner.block_size == 16
    assert "16\n            for `torch`" in Config.__doc__
