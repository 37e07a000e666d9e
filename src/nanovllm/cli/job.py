"""The offline job on a terminal: progress, complaints about lines, a closing account."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nanovllm.cli.options import EngineOptions, JobOptions
from nanovllm.cli.terminal import ExitCode, open_engine, report_error, stderr, usage_errors
from nanovllm.jobs import Job

if TYPE_CHECKING:
    from nanovllm.llm import LLM


def run_job(
    options: JobOptions, defaults: Mapping[str, Any], engine: EngineOptions, *, as_json: bool
) -> None:
    """Run or resume a job; exit code 1 if any of its lines has failed, now or earlier."""
    assert options.files is not None
    if engine.tensor_parallel_size > 1 and int(os.environ.get("RANK", "0")) > 0:
        open_engine(engine)  # launched as another rank than 0: serves, and ends there
    source, target = options.files
    with usage_errors():
        job = Job(source, target, defaults, model=engine.model, overwrite=options.overwrite)
    with job:
        num_resumed = job.num_recorded
        if not job.is_complete:
            with open_engine(engine, data_parallel_size=options.data_parallel_size) as llm:
                _work(job, llm, source)
    if as_json:
        account = {
            "input": str(source),
            "output": str(target),
            "num_lines": job.num_lines,
            "num_failed": job.num_failed,
            "num_resumed": num_resumed,
        }
        typer.echo(json.dumps(account))
    else:
        earlier = f", {num_resumed} by an earlier run" if num_resumed else ""
        stderr().print(
            f"{target}: {job.num_recorded} lines{earlier}; {job.num_failed} failed", soft_wrap=True
        )
    if job.num_failed:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _work(job: Job, llm: LLM, source: Path) -> None:
    console = stderr()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lines, {task.fields[tokens]} tokens,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    try:
        with progress, closing(job.run(llm)) as records:
            bar = progress.add_task("", total=job.num_lines, completed=job.num_recorded, tokens=0)
            num_tokens = 0
            for record in records:
                if "error" in record:
                    report_error(f"{source}, line {record['line']}: {record['error']}", console)
                num_tokens += sum(len(s["token_ids"]) for s in record.get("samples", ()))
                progress.update(bar, advance=1, tokens=num_tokens)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where this one stopped")
        raise
