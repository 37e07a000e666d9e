"""From an engine's name to its doors: in this process, or behind a pipe."""

from __future__ import annotations

import json
import shlex
import sys
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, cast

from nanovllm.conformance.host import kind_of, message_of
from nanovllm.conformance.protocol import (
    BlocksDoor,
    CoreDoor,
    EngineDoor,
    EngineFault,
    Refused,
    Unsupported,
)
from nanovllm.conformance.remote import Closing, RemoteDoor, exception

Transport = Literal["subprocess", "in-process"]

HERE = Path(__file__).parent
REFERENCE = "nanovllm.conformance.adapters.reference:Reference"
OURS = {name: f"{HERE / 'adapters' / name}.py:adapter" for name in ("nanovllm_like", "hf", "vllm")}
"""Adapters that run by path in the engine's interpreter, next to nothing of this package."""


class OpenDoor(BlocksDoor, CoreDoor, EngineDoor, Protocol):
    """Every call of every door; those that an engine lacks raise Unsupported."""

    def stop(self) -> None:
        """End the program behind the door, if there is one."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_door(
    engine: str,
    *,
    path: str | Path | None = None,
    python: str | None = None,
    options: Mapping[str, Any] | None = None,
    transport: Transport = "subprocess",
    timeout_s: float = 10.0,
    slow_timeout_s: float = 600.0,
) -> OpenDoor:
    """A door to an engine by its name on the command line.

    Args:
        engine: `reference`, `nanovllm_like`, `hf`, `vllm`, `module:factory`, `path.py:factory`, or
            `cmd:PROGRAM`, which speaks the protocol itself.
        path: directory of the engine, put first on its path.
        python: its interpreter; ours if None.
        options: keyword arguments of the factory.
        transport: `in-process` is for `reference` only, whose package is ours.
        timeout_s: limit of a call; `slow_timeout_s` for those in `SLOW_CALLS`.

    Raises:
        ValueError: no such engine, one that cannot run in this process, or no path for one that is
            nothing but a path.
    """
    if transport == "in-process":
        if engine != "reference":
            raise ValueError(f"{engine!r} runs in its own process; only reference may run in ours")
        from nanovllm.conformance.adapters.reference import Reference

        return local_door(Reference(**(options or {})))
    command = command_line(engine, path=path, python=python, options=options or {})
    return RemoteDoor(command, timeout_s=timeout_s, slow_timeout_s=slow_timeout_s)


def command_line(
    engine: str,
    *,
    path: str | Path | None = None,
    python: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """The program behind a door, as arguments; see `open_door`."""
    if engine.startswith("cmd:"):
        return shlex.split(engine.removeprefix("cmd:"))
    if engine == "nanovllm_like" and path is None:
        raise ValueError("nanovllm_like is any engine with the tutorial's classes: which path?")
    adapter, default_path = _adapter(engine)
    where = path if path is not None else default_path
    command = [python or sys.executable, str(HERE / "host.py"), "--adapter", adapter]
    if where is not None:
        command += ["--path", str(Path(where).resolve())]
    for key, value in (options or {}).items():
        command += ["--option", f"{key}={json.dumps(value)}"]
    return command


def _adapter(engine: str) -> tuple[str, Path | None]:
    """What `host.py --adapter` takes, and the directory to look in if none is given."""
    if engine == "reference":
        spec = find_spec("nanovllm")
        assert spec is not None
        assert spec.origin is not None
        return REFERENCE, Path(spec.origin).parents[1]
    if engine in OURS:
        return OURS[engine], None
    source, colon, factory = engine.rpartition(":")
    if not colon or not source or not factory:
        names = ", ".join(["reference", *OURS])
        raise ValueError(
            f"no engine {engine!r}: expected {names}, module:factory, path.py:factory or "
            "cmd:PROGRAM"
        )
    if not source.endswith(".py"):
        return engine, Path.cwd()
    file = Path(source).resolve()
    if not file.is_file():
        raise ValueError(f"no engine {engine!r}: there is no file {file}")
    return f"{file}:{factory}", file.parent


class _Local(Closing):
    """An adapter in this process; what it raises is told as through a pipe."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._adapter, name, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            if method is None:
                raise Unsupported(f"the adapter has no {name!r}")
            try:
                return method(*args, **kwargs)
            except (Refused, Unsupported, EngineFault):
                raise
            except Exception as error:
                kind, message = kind_of(name, error), message_of(error)
                raise exception(kind, message, traceback.format_exc()) from error

        # The next look-up finds it without coming here.
        self.__dict__[name] = call
        return call


def local_door(adapter: Any) -> OpenDoor:
    """The doors of an adapter that lives in this process, such as a planted fault."""
    return cast(OpenDoor, _Local(adapter))
