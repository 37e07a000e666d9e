"""`nanovllm info`: what a model would run as, here."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm import __version__
from nanovllm.cli.options import EngineOptions, with_options
from nanovllm.cli.terminal import open_engine

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.models.model_config import ModelConfig

# Named as in the requirements; an engine that is asked for less has fewer.
CAPABILITIES = (
    "abort",
    "chunked_prefill",
    "fail_step",
    "greedy",
    "logprobs",
    "min_p",
    "min_tokens",
    "n",
    "penalties",
    "prefix_cache",
    "salt",
    "sampling",
    "seed",
    "stats",
    "stop",
    "stream",
    "top_k",
    "top_p",
)
LIBRARIES = ("torch", "transformers", "safetensors")


@with_options
def info(
    engine: EngineOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the model, its KV cache and what the engine can do, on this machine.

    Examples:

      nanovllm info
      nanovllm info --model ~/models/Qwen3-0.6B --num-blocks 1000 --json
    """
    with open_engine(engine) as llm:
        report = describe(llm)
    if as_json:
        typer.echo(json.dumps(report))
        return
    for title, values in report.items():
        typer.secho(title, bold=True)
        for name, value in values.items():
            typer.echo(f"  {name:<24}{_readable(value)}")


def describe(llm: LLM) -> dict[str, dict[str, Any]]:
    """All of it as JSON values, in groups."""
    model, runner, config = llm.model_config, llm.model_runner, llm.config
    missing = {"prefix_cache", "salt"} if not config.enable_prefix_caching else set()
    return {
        "model": {
            "path": str(config.model),
            "architecture": str(model.architecture),
            "parameters": count_parameters(model),
            "checkpoint_dtype": str(model.dtype).removeprefix("torch."),
            "layers": model.num_hidden_layers,
            "heads": model.num_attention_heads,
            "kv_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "eos_token_ids": sorted(model.eos_token_ids),
        },
        "kv_cache": {
            "block_size": runner.block_size,
            "bytes_per_token": runner.block_bytes // runner.block_size,
            "bytes_per_block": runner.block_bytes,
            "blocks": runner.num_blocks,
            "bytes": runner.num_blocks * runner.block_bytes,
        },
        "ranks": {
            f"rank {info.rank}": {
                "device": info.device,
                "blocks": info.num_blocks,
                "kv_bytes": info.kv_bytes,
            }
            for info in runner.rank_infos
        },
        "engine": {
            "device": str(runner.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "attention_backend": runner.backend.name,
            "max_model_len": runner.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "scheduling_policy": config.scheduling_policy,
            "steps_ahead": runner.steps_ahead,
            "cuda_graphs": runner.num_graphs,
            "cuda_graph_seconds": round(runner.graph_seconds, 2),
            "capabilities": [name for name in CAPABILITIES if name not in missing],
        },
        "versions": {"python": platform.python_version(), "nanovllm": __version__}
        | {library: version(library) for library in LIBRARIES},
    }


def count_parameters(model: ModelConfig) -> int:
    """Of the whole model, however many ranks share it."""
    import torch

    from nanovllm.layers.parallel import TensorParallel
    from nanovllm.models.registry import MODEL_CLASSES

    with torch.device("meta"):
        whole = MODEL_CLASSES[model.architecture](model, TensorParallel())
    return sum(parameter.numel() for parameter in whole.parameters())


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
