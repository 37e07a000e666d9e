"""One step ahead or not: engines with a late runner, requests that end early, equal outcomes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from late_runner import LateRunner
from tiny_models import make_checkpoint

from nanovllm.config import Config
from nanovllm.layers.torch_attention import TorchBackend
from nanovllm.models.model_config import ModelConfig
from nanovllm.outputs import RequestOutput

ALPHABET = "abc"
LETTERS = list("efghijklmnopqrstuvwxyz")
SIZES = {"kvcache_block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "seed": 0}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"stop": LETTERS},
    {"stop": LETTERS, "logprobs": 1},
    {"stop": LETTERS, "repetition_penalty": 1.3},
    {"n": 2},
    {"top_k": 5},
    {"repetition_penalty": 1.3},
    {"min_tokens": 1},
    {"logprobs": 1},
    {"ignore_eos": True},
]
"""Of sampling parameters, beside a temperature of 2."""


def make_flat_checkpoint(directory: Path) -> Path:
    """Its logits are flat enough that draws at temperature 2 hit the eos and the stop strings."""
    return make_checkpoint(directory, scale=0.3, eos_token_id=[97, 40], tokenizer=True)


@contextmanager
def late_runners(steps_ahead: int = 1) -> Iterator[type[LateRunner]]:
    """Engines made within have a runner that is late; yields its class, a new one each time."""

    class Runner(LateRunner):
        pass

    Runner.steps_ahead = steps_ahead

    def make(config: Config, model_config: ModelConfig) -> LateRunner:
        return Runner(config, model_config, TorchBackend(), torch.device("cpu"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.engine.llm_engine.make_runner", make)
        yield Runner


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """Where either was aborted or failed, it may have got less far."""
    cut_short = {"abort", "error"} & {s.finish_reason for o in (one, other) for s in o.samples}
    for a, b in zip(one.samples, other.samples, strict=True):
        if cut_short:
            shared = min(len(a.token_ids), len(b.token_ids))
            assert a.token_ids[:shared] == b.token_ids[:shared]
        else:
            told = [(s.token_ids, s.text, s.finish_reason) for s in (a, b)]
            assert told[0] == told[1]
