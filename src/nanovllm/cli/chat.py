"""`nanovllm chat`: a conversation on the terminal, or through a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm.cli.options import EngineOptions, SamplingOptions, with_options
from nanovllm.cli.terminal import ExitCode, open_engine, report_error, stderr, usage_errors
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM


@with_options
def chat(
    sampling: SamplingOptions,
    engine: EngineOptions,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.")
    ] = None,
) -> None:
    """Talk with the model; its answers are streamed, and it remembers the conversation.

    Examples:

      nanovllm chat
      nanovllm chat --system "Answer briefly." --temperature 0.7
      printf 'Hello\\nWho are you?\\n' | nanovllm chat

    A line is a message. /reset forgets the conversation, /exit or Ctrl-D leaves.
    Ctrl-C stops the answer; pressed again, or with no answer under way, it leaves.

    Exit codes: 0 all is well, 1 a message failed, 2 bad usage, 130 Ctrl-C.
    """
    with usage_errors():
        params = SamplingParams(**sampling.as_params())
    with open_engine(engine) as llm:
        conversation = Conversation(llm, params, system)
        if sys.stdin.isatty():
            stderr().print(
                f"{engine.model.name}: /reset forgets, /exit leaves, Ctrl-C stops an answer",
                style="dim",
            )
        for line in _user_lines():
            _obey_or_answer(conversation, line)
    if conversation.num_failed:
        raise typer.Exit(ExitCode.SOME_FAILED)


def _user_lines() -> Iterator[str]:
    """What the user types, until /exit or the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            typer.echo(nl=bool(prompt))
            return
        if line == "/exit":
            return
        if line:
            yield line


def _obey_or_answer(conversation: Conversation, line: str) -> None:
    if line == "/reset":
        conversation.reset()
    elif line.startswith("/"):
        report_error(f"{line} is no command; /reset and /exit are")
    else:
        conversation.answer(line)


class Conversation:
    """The messages so far, and how the next one is answered."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.num_failed = 0
        self.system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.system)

    def answer(self, text: str) -> None:
        """Print the answer as it comes. A message that fails leaves the conversation unchanged;
        an answer that is stopped stays in it as far as it was printed."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self._stream(self.llm.apply_chat_template(asked))
        except (ValueError, TypeError) as error:
            self.num_failed += 1
            report_error(f"{error}" + (" (/reset forgets)" if self.messages else ""))
        else:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _stream(self, prompt: list[int]) -> str:
        answer = ""
        with closing(self.llm.stream(prompt, self.params)) as chunks, _interrupt() as interrupted:
            for chunk in chunks:
                typer.echo(chunk.text, nl=False)
                answer += chunk.text
                if chunk.finish_reason == "error":
                    typer.echo()
                    raise ValueError(chunk.error)
                if interrupted.is_set():
                    break
        typer.echo()
        return answer


@contextmanager
def _interrupt() -> Iterator[Event]:
    """Set by the first Ctrl-C, so that no step is torn apart; the second one interrupts as ever."""
    interrupted = Event()

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
