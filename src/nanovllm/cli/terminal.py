"""What all commands share: errors on stderr, exit codes, and how an engine comes up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from nanovllm.cli.options import EngineOptions

if TYPE_CHECKING:
    from nanovllm.llm import LLM


class ExitCode(IntEnum):
    """Beside 0, and 130 for Ctrl-C."""

    SOME_FAILED = 1
    USAGE = 2


def stderr() -> Console:
    """Where people are told things, in colour if it is a terminal."""
    return Console(stderr=True, highlight=False)


def report_error(message: str, console: Console | None = None) -> None:
    """One line on stderr; `console` if a progress bar is live on it."""
    text = Text.assemble(("error: ", "bold red"), message)
    (console or stderr()).print(text, soft_wrap=True)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Ends the command with a message and exit code 2 if the engine refuses what it was given."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        report_error(str(error))
        raise typer.Exit(ExitCode.USAGE) from error


def open_engine(options: EngineOptions, **others: Any) -> LLM:
    """The engine of these options, ready to run; `others` are fields of `Config`, too."""
    with usage_errors(), stderr().status("loading the model"):
        from nanovllm.llm import LLM  # imports for seconds, which --help and bad usage need not

        return LLM(**asdict(options), **others)
