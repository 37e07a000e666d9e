"""The command line. Errors go to stderr; `ExitCode` lists the exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

from nanovllm import __version__
from nanovllm.cli.bench import bench
from nanovllm.cli.chat import chat
from nanovllm.cli.generate import generate
from nanovllm.cli.info import info
from nanovllm.cli.study import study


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nanovllm {__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """An inference engine for language models, small enough to read.

    It comes with a tiny model, so this works at once:

      nanovllm generate "In the beginning"
      nanovllm chat
      nanovllm info
      nanovllm conformance run --engine reference

    Any Qwen3 checkpoint in a local directory runs with --model DIR.
    """


def build_app() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (generate, chat, info, bench, study):
        app.command()(command)
    # Its commands import the engine, the suite and their tools only when they run.
    from nanovllm.conformance.cli import conformance_app
    from nanovllm.gate.cli import gate_app

    app.add_typer(conformance_app(), name="conformance")
    app.add_typer(gate_app(), name="gate")
    return app


def main() -> None:
    """Entry point of the `nanovllm` command."""
    build_app()(prog_name="nanovllm")
