"""A program that answers lines with lines, within a time limit."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from time import monotonic
from typing import IO

STDERR_LINES = 12


class PipeError(Exception):
    """The program died or is silent; it has been killed."""


class LinePipe:
    """Starts `command` in a process group of its own; `exchange` talks to it.

    Its stderr is kept in a temporary file, whose last lines are part of an error's message.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        # Appending, because the program shares our position in the file.
        self._stderr: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise PipeError(f"cannot start {command[0]}: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._received = bytearray()
        # Also when we are collected or the interpreter ends: no engine outlives its door.
        self.kill = weakref.finalize(self, _kill, self._process)

    def exchange(self, line: bytes, timeout_s: float) -> bytes:
        """Send a line, return the next one that comes.

        Both sides move at once, since a long line fills the pipe before the program reads it.

        Raises:
            PipeError: no whole line came within `timeout_s`.
        """
        deadline = monotonic() + timeout_s
        unsent = memoryview(line)
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            selector.register(self._in, selectors.EVENT_WRITE)
            while b"\n" not in self._received:
                ready = {key.fd for key, _ in selector.select(max(deadline - monotonic(), 0))}
                if not ready:
                    raise self._failure(f"no answer within {timeout_s:g} s")
                if self._in in ready:
                    unsent = self._send(unsent)
                    if not unsent:
                        selector.unregister(self._in)
                if self._out in ready:
                    self._receive()
        reply, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return reply

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._in, unsent) :]
        except BrokenPipeError:
            raise self._failure("it closed its input") from None

    def _receive(self) -> None:
        chunk = os.read(self._out, 1 << 16)
        if not chunk:
            raise self._failure("it closed its output")
        self._received += chunk

    def _failure(self, what: str) -> PipeError:
        """Kill the program, and tell how it ended and what it said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that ends by itself closed its pipes an instant ago.
            self._process.wait(0.2 if what.startswith("it closed") else 0)
        code = self._process.returncode
        self.kill()
        if code is not None:
            what += f"; exit code {code}" if code >= 0 else f"; {signal.Signals(-code).name}"
        if last := self.stderr():
            what += f": {last.splitlines()[-1]}\n{last}"
        return PipeError(what)

    def stderr(self) -> str:
        """The last lines that the program wrote there."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(self._stderr.tell() - (1 << 14), 0))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-STDERR_LINES:])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, and reap the program."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
