"""Options that several commands share, as dataclasses: a field is an option of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from nanovllm.config import EMBEDDED_MODEL


def panel(title: str) -> Callable[..., Any]:
    """Makes options under one heading of the help."""

    def option(help: str, *names: str, **details: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=title, **details)

    return option


_job = panel("A file of prompts")
_sampling = panel("Sampling")
_stopping = panel("Stopping")
_engine = panel("Engine")
_cache = panel("KV cache")


@dataclass(frozen=True)
class JobOptions:
    """Files of the offline job."""

    source: Annotated[
        Path | None,
        _job("JSON lines, a request each.", "--input", "-i", exists=True, dir_okay=False),
    ] = None
    target: Annotated[
        Path | None,
        _job(
            "JSON lines, a result each, in the same order. If it has results of this job, the job "
            "goes on after them.",
            "--output",
            "-o",
            dir_okay=False,
        ),
    ] = None
    data_parallel_size: Annotated[
        int, _job("Engines that share the job, through Ray; on CUDA a GPU each, times the ranks.")
    ] = 1
    overwrite: Annotated[bool, _job("Start anew, whatever is in --output.", "--overwrite")] = False

    @property
    def files(self) -> tuple[Path, Path] | None:
        """Input and output; None if none of these options was given, ValueError if some lack."""
        if self.source is not None and self.target is not None:
            return self.source, self.target
        if self.source is not None or self.target is not None or self.overwrite:
            raise ValueError("--input and --output go together")
        if self.data_parallel_size != 1:
            raise ValueError("--data-parallel-size goes with --input and --output")
        return None


@dataclass(frozen=True)
class SampleOptions:
    """The fields of `SamplingParams` that make no sense in a chat."""

    n: Annotated[int, _sampling("Independent samples.", "-n")] = 1
    logprobs: Annotated[
        int | None,
        _sampling(
            "With --json or --output: log probabilities of each token and of the K likeliest.",
            metavar="K",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """The other fields of `SamplingParams`; its `max_tokens` None is 0 here."""

    temperature: Annotated[
        float, _sampling("0 always takes the likeliest token; 1 draws as the model was trained.")
    ] = 1.0
    top_k: Annotated[int, _sampling("Draw from the K likeliest tokens; 0: from all.")] = 0
    top_p: Annotated[
        float, _sampling("Draw from the fewest tokens that together are this probable.")
    ] = 1.0
    min_p: Annotated[
        float, _sampling("Leave out tokens less probable than this share of the likeliest.")
    ] = 0.0
    seed: Annotated[
        int | None, _sampling("The same seed gives the same text again; none: another each time.")
    ] = None
    repetition_penalty: Annotated[
        float, _sampling("Above 1: avoid tokens of the prompt and of the text so far.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _sampling("Above 0: avoid tokens of the text so far (-2 to 2).")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("The same, the more the oftener they occurred (-2 to 2).")
    ] = 0.0
    max_tokens: Annotated[
        int, _stopping("Most tokens to generate; 0: to the end of the model's context.")
    ] = 256
    min_tokens: Annotated[int, _stopping("Do not stop before this many tokens.")] = 0
    stop: Annotated[
        list[str] | None, _stopping("End before this text; may be given several times.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        _stopping("End after this token id; may be given several times.", "--stop-token-id"),
    ] = None
    include_stop: Annotated[
        bool, _stopping("Keep the text of --stop at the end.", "--include-stop")
    ] = False
    ignore_eos: Annotated[
        bool, _stopping("Go on past the model's own end of text.", "--ignore-eos")
    ] = False

    def as_params(self) -> dict[str, Any]:
        """Keywords of `SamplingParams`, without those whose default None stands for nothing."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return values | {"max_tokens": self.max_tokens or None}


@dataclass(frozen=True)
class EngineOptions:
    """Fields of `Config`, but for its seed, which the seed of the sampling makes needless."""

    model: Annotated[
        Path,
        _engine(
            "Directory of a Hugging Face checkpoint; the embedded model if not given.",
            "--model",
            "-m",
            metavar="DIR",
            show_default=False,
        ),
    ] = EMBEDDED_MODEL
    device: Annotated[str, _engine("Where to run: auto, cpu or cuda.")] = "auto"
    dtype: Annotated[
        str,
        _engine("Of weights and KV cache: auto, float32, bfloat16 or float16."),
    ] = "auto"
    max_model_len: Annotated[
        int | None, _engine("Most tokens of prompt and output; none: the model's own limit.")
    ] = None
    max_num_seqs: Annotated[int, _engine("Sequences that run at once.")] = 512
    max_num_batched_tokens: Annotated[int, _engine("Tokens computed per step.")] = 16384
    scheduling_policy: Annotated[
        str,
        _engine(
            "prefill_first computes prompts in steps of their own; mixed lets decodes go first and "
            "prompts fill what they leave.",
            "--policy",
        ),
    ] = "prefill_first"
    max_consecutive_prefills: Annotated[
        int, _engine("Such steps in a row while decodes wait (prefill_first).")
    ] = 8
    tensor_parallel_size: Annotated[
        int, _engine("Ranks that share each layer: a process each, and a GPU each on CUDA.")
    ] = 1
    attention_backend: Annotated[
        str, _engine("auto, torch, triton or flash_attn; auto is triton on CUDA.", "--backend")
    ] = "auto"
    enforce_eager: Annotated[bool, _engine("Never use CUDA graphs.", "--enforce-eager")] = False
    async_scheduling: Annotated[
        bool,
        _engine(
            "On CUDA, launch a step before the tokens of the one before are known.",
            "--async-scheduling/--no-async-scheduling",
        ),
    ] = True
    skip_tokenizer: Annotated[
        bool, _engine("Token ids in, token ids out (needs --input).", "--skip-tokenizer")
    ] = False
    trace: Annotated[
        Path | None,
        _engine("Log plans and tokens to this file, for `nanovllm conformance check`."),
    ] = None
    kvcache_block_size: Annotated[
        int | None, _cache("Tokens per block; none: the backend's choice.", "--block-size")
    ] = None
    num_kvcache_blocks: Annotated[
        int | None, _cache("Blocks of the cache; none: as memory allows.", "--num-blocks")
    ] = None
    kvcache_memory_gb: Annotated[
        float | None,
        _cache(
            "Memory of the cache, in GiB; none: 1 on a CPU, what the next option leaves on a GPU.",
            "--kv-memory-gb",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str, _cache("auto, or fp8: half the memory and its traffic, less precise.")
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, _cache("Share of a GPU's memory that this engine may use.")
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool,
        _cache(
            "Share the KV of equal prefixes between requests.", "--prefix-cache/--no-prefix-cache"
        ),
    ] = True


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass replaced by its fields, for typer.

    `typer` reads the signature of a function; this makes one from the annotations, so that a group
    of options is declared once and arrives as one checked value.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += _field_parameters(groups[name])
        else:
            parameters.append(
                parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
            )

    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _field_parameters(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    assert all(f.default is not MISSING for f in fields(group)), f"{group} needs defaults"
    return [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]
