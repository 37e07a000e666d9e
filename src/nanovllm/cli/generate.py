"""`nanovllm generate`: one prompt streamed to the terminal, or a file of them."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm.cli.job import run_job
from nanovllm.cli.options import (
    EngineOptions,
    JobOptions,
    SampleOptions,
    SamplingOptions,
    with_options,
)
from nanovllm.cli.terminal import ExitCode, open_engine, report_error, stderr, usage_errors
from nanovllm.jobs import sample_records
from nanovllm.outputs import StreamChunk
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM


@with_options
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to go on from; - reads it from stdin.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    *,
    job: JobOptions,
    sampling: SamplingOptions,
    samples: SampleOptions,
    engine: EngineOptions,
) -> None:
    """Generate text, from one prompt or from a file of them.

    One prompt is streamed to the terminal:

      nanovllm generate "In the beginning"
      nanovllm generate "Once upon a time" --temperature 0 --max-tokens 40
      nanovllm generate "It was" -n 3 --seed 7 --stop "."
      cat letter.txt | nanovllm generate - --json

    A file of prompts is a job:

      nanovllm generate --input prompts.jsonl --output results.jsonl

    Each line of it has one of "prompt", "prompt_token_ids" or "messages", if
    wanted an "id", and sampling parameters of its own beside them; the options
    are the parameters of lines that give none:

      {"prompt": "In the beginning", "max_tokens": 20, "seed": 1}
      {"id": "b", "messages": \\[{"role": "user", "content": "Hello"}]}

    A line that cannot be answered is reported, gets a result with "error", and
    does not stop the others. If the job is killed, the same command goes on
    where it stopped.

    Exit codes: 0 all is well, 1 something failed, 2 bad usage, 130 Ctrl-C.
    """
    keywords = sampling.as_params() | asdict(samples)
    with usage_errors():
        params = SamplingParams(**keywords)
        if (prompt is None) == (job.files is None):
            raise ValueError("give either a PROMPT, or both --input and --output")
    if prompt is None:
        run_job(job, keywords, engine, as_json=as_json)
        return
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    with open_engine(engine) as llm:
        with usage_errors():
            llm.validate(text, params)
        (_print_json if as_json else _stream)(llm, text, params)


def _print_json(llm: LLM, prompt: str, params: SamplingParams) -> None:
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    result = {
        "prompt": prompt,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "samples": sample_records(output),
    }
    typer.echo(json.dumps(result))
    if any(sample.finish_reason == "error" for sample in output.samples):
        raise typer.Exit(ExitCode.SOME_FAILED)


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    printer = SamplePrinter(params.n)
    begin = perf_counter()
    for chunk in llm.stream(prompt, params):
        printer.take(chunk)
    seconds = perf_counter() - begin
    if stderr().is_terminal:
        rate = printer.num_tokens / seconds
        stderr().print(
            f"{printer.num_tokens} tokens, {rate:.0f} a second; ended by {printer.finish_reasons}",
            style="dim",
        )
    if printer.failed:
        raise typer.Exit(ExitCode.SOME_FAILED)


class SamplePrinter:
    """Prints `n` samples one after the other: one as it grows, those after it when it has ended."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.num_tokens = 0
        self.failed = False
        self._ends: list[str] = []
        self._held: tuple[deque[StreamChunk], ...] = tuple(deque() for _ in range(n))
        self._label()

    @property
    def finish_reasons(self) -> str:
        return ", ".join(self._ends)

    def take(self, chunk: StreamChunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        self._held[chunk.sample_index].append(chunk)
        while len(self._ends) < self.n and self._held[len(self._ends)]:
            self._print(self._held[len(self._ends)].popleft())

    def _print(self, chunk: StreamChunk) -> None:
        typer.echo(chunk.text, nl=chunk.finish_reason is not None)
        if chunk.finish_reason is None:
            return
        if chunk.finish_reason == "error":
            self.failed = True
            report_error(str(chunk.error))
        self._ends.append(chunk.finish_reason)
        self._label()

    def _label(self) -> None:
        if self.n > 1 and len(self._ends) < self.n:
            typer.echo(f"--- sample {len(self._ends) + 1} of {self.n} ---")
