"""The doors of a program that speaks the protocol of docs/protocol.md over its pipes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from nanovllm.conformance.codec import ProtocolError, decode
from nanovllm.conformance.host import plain
from nanovllm.conformance.pipe import LinePipe, PipeError
from nanovllm.conformance.protocol import (
    CAPABILITIES,
    PROTOCOL,
    CacheStats,
    EngineFault,
    EngineRequest,
    EngineResult,
    Finished,
    Hello,
    Plan,
    PoolView,
    Refused,
    RequestId,
    RequestOptions,
    Unsupported,
    World,
)

SLOW_CALLS = frozenset({"hello", "open", "generate", "stream", "close"})
"""Calls that may start an interpreter, load a model or run one."""

STARTING_CALLS = frozenset({"hello", "reset", "open"})
"""Calls that need nothing of what went before, so that a dead program is started again."""


def exception(kind: str, message: str, trace: str) -> Exception:
    """What an error of the protocol is in Python; see docs/protocol.md."""
    if kind == "refused":
        return Refused(message)
    if kind == "unsupported":
        return Unsupported(message)
    if kind == "fault":
        return EngineFault(f"{message}\n{trace}".rstrip())
    return ProtocolError(f"an error of unknown kind {kind!r}: {message}")


class Closing:
    """A context manager that ends with `stop`."""

    def stop(self) -> None:
        """Nothing runs elsewhere."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class RemoteDoor(Closing):
    """A program that speaks the protocol; started by the first call, and again after it died.

    Args:
        command: the program and its arguments.
    """

    def __init__(
        self, command: Sequence[str], *, timeout_s: float = 10.0, slow_timeout_s: float = 600.0
    ) -> None:
        self.command = tuple(command)
        self.timeout_s = timeout_s
        self.slow_timeout_s = slow_timeout_s
        self._pipe: LinePipe | None = None
        self._started = False
        self._id = 0

    def call(self, name: str, kind: Any, **args: Any) -> Any:
        """One call of the protocol.

        Args:
            kind: type of its result, see `codec.decode`.

        Raises:
            Refused, Unsupported, EngineFault: what the adapter answered, or its end.
            ProtocolError: what it answered is not of the protocol.
        """
        self._id += 1
        message = {"id": self._id, "call": name, "args": plain(args)}
        line = json.dumps(message).encode() + b"\n"
        try:
            slow = name in SLOW_CALLS or self._pipe is None
            pipe = self._running(name)
            reply = pipe.exchange(line, self.slow_timeout_s if slow else self.timeout_s)
        except PipeError as error:
            self._pipe = None
            raise EngineFault(f"{name}: {error}") from None
        return decode(kind, self._result(name, reply), name)

    def _running(self, name: str) -> LinePipe:
        if self._pipe is None:
            if self._started and name not in STARTING_CALLS:
                raise EngineFault(f"{name}: the program has ended; reset or open it first")
            self._pipe = LinePipe(self.command)
            self._started = True
        return self._pipe

    def _result(self, name: str, line: bytes) -> Any:
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not reply.keys() & {"result", "error"}:
            raise ProtocolError(f"{name}: no JSON object with result or error: {line!r:.200}")
        if reply.get("id") != self._id:
            raise ProtocolError(f"{name}: the answer to {self._id} has the id {reply.get('id')!r}")
        if "error" not in reply:
            return reply["result"]
        error = reply["error"] if isinstance(reply["error"], dict) else {}
        kind, message = str(error.get("kind")), str(error.get("message", ""))
        raise exception(kind, message, str(error.get("traceback") or ""))

    # ---- any door --------------------------------------------------------------------------

    def hello(self) -> Hello:
        hello: Hello = self.call("hello", Hello)
        if hello.protocol != PROTOCOL:
            raise ProtocolError(f"hello: protocol {hello.protocol}; this suite speaks {PROTOCOL}")
        unknown = sorted(hello.capabilities - CAPABILITIES)
        if unknown:
            raise ProtocolError(
                f"hello: unknown capabilities {', '.join(unknown)}; "
                f"there are {', '.join(sorted(CAPABILITIES))}"
            )
        return hello

    def reset(self, world: World) -> None:
        self.call("reset", Any, world=world)

    def pool(self) -> PoolView:
        view: PoolView = self.call("pool", PoolView)
        return view

    # ---- blocks ----------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int]) -> int:
        return int(self.call("lookup", int, token_ids=token_ids))

    def allocate(self, request: int, token_ids: Sequence[int]) -> tuple[list[int], int] | None:
        kind = tuple[list[int], int] | None
        answer: tuple[list[int], int] | None = self.call(
            "allocate", kind, request=request, token_ids=token_ids
        )
        return answer

    def append(self, request: int, token_id: int) -> list[int] | None:
        kind = list[int] | None
        table: list[int] | None = self.call("append", kind, request=request, token_id=token_id)
        return table

    def release(self, request: int) -> None:
        self.call("release", Any, request=request)

    # ---- core ------------------------------------------------------------------------------

    def add(
        self, request: int, prompt: Sequence[int], max_tokens: int, options: RequestOptions
    ) -> None:
        args = {"request": request, "prompt": prompt, "max_tokens": max_tokens, "options": options}
        self.call("add", Any, **args)

    def schedule(self) -> Plan:
        plan: Plan = self.call("schedule", Plan)
        return plan

    def commit(self, step: int, tokens: Mapping[RequestId, int]) -> list[Finished]:
        return list(self.call("commit", list[Finished], step=step, tokens=list(tokens.items())))

    def abort(self, request: int) -> bool:
        return bool(self.call("abort", bool, request=request))

    def fail_step(self, step: int) -> list[Finished]:
        return list(self.call("fail_step", list[Finished], step=step))

    def hash(self, token_ids: Sequence[int], parent: str | None) -> str:
        return str(self.call("hash", str, token_ids=token_ids, parent=parent))

    def wire(self, id: RequestId) -> int:
        return int(self.call("wire", int, id=id))

    def stats(self) -> CacheStats:
        stats: CacheStats = self.call("stats", CacheStats)
        return stats

    # ---- engine ----------------------------------------------------------------------------

    def open(self, model: str, options: Mapping[str, Any]) -> None:
        self.call("open", Any, model=model, options=options)

    def generate(self, requests: Sequence[EngineRequest]) -> list[list[EngineResult]]:
        kind = list[list[EngineResult]]
        results: list[list[EngineResult]] = self.call("generate", kind, requests=requests)
        return results

    def stream(self, request: EngineRequest, abort_after: int | None = None) -> list[str]:
        return list(self.call("stream", list[str], request=request, abort_after=abort_after))

    def reset_prefix_cache(self) -> None:
        self.call("reset_prefix_cache", Any)

    def close(self) -> None:
        self.call("close", Any)

    # ---- the program -----------------------------------------------------------------------

    def stop(self) -> None:
        """End it; the next `hello`, `reset` or `open` starts it again."""
        if self._pipe is not None:
            self._pipe.kill()
            self._pipe = None
