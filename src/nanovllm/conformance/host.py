"""Serves an adapter over JSON lines. One file, standard library only, run by path in the engine's
own interpreter, so that nothing of this package is on the engine's path:

    python host.py --adapter MODULE:FACTORY|FILE.py:FACTORY [--path DIR] [--option KEY=VALUE]...

`FACTORY(**options)` returns an object with the methods of a door. It may answer with plain
dictionaries, lists and tuples, with dataclasses, or with any mixture: `plain` turns all into JSON.
What it is given is as plain: `world`, `options` and requests are objects with attributes, request
ids are tuples `(request, sample)`. docs/protocol.md describes what passes through the pipes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TextIO

PROTOCOL = 1

BLOCKS_CALLS = ("lookup", "allocate", "append", "release")
CORE_CALLS = ("add", "schedule", "commit", "abort", "fail_step", "hash", "wire", "stats")
ENGINE_CALLS = ("open", "generate", "stream", "reset_prefix_cache", "close")
CALLS = ("hello", "reset", "pool", *BLOCKS_CALLS, *CORE_CALLS, *ENGINE_CALLS)

REFUSING = ("reset", "add", "open", "generate", "stream")
"""Calls in which a ValueError of the engine means that it refuses what it was given."""


def plain(value: Any) -> Any:
    """`value` as JSON: a mapping with other keys than strings becomes a list of pairs."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) or hasattr(value, "items"):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return [[plain(key), plain(item)] for key, item in value.items()]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain(item) for item in value]


def _object(value: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**value)


def _objects(value: list[dict[str, Any]]) -> list[SimpleNamespace]:
    return [_object(item) for item in value]


def _tokens(value: Any) -> dict[Any, int]:
    return {tuple(id): token for id, token in value}


ARGUMENTS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("reset", "world"): _object,
    ("add", "options"): _object,
    ("commit", "tokens"): _tokens,
    ("wire", "id"): tuple,
    ("generate", "requests"): _objects,
    ("stream", "request"): _object,
}


def kind_of(call: str, error: BaseException) -> str:
    """How an exception is told: by the name of its class, so that an adapter needs no import."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"Unsupported", "NotImplementedError"}:
        return "unsupported"
    if "Refused" in names or ("ValueError" in names and call in REFUSING):
        return "refused"
    return "fault"


def message_of(error: BaseException) -> str:
    """Its text, and what it is unless that is said elsewhere."""
    name = type(error).__name__
    return str(error) if name in ("Refused", "Unsupported") else f"{name}: {error}".rstrip(": ")


def answer(adapter: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Reply to one message."""
    reply: dict[str, Any] = {"id": message.get("id")}
    call = message.get("call", "")
    method = getattr(adapter, call, None) if call in CALLS else None
    if method is None:
        error = {"kind": "unsupported", "message": f"the adapter has no {call!r}"}
        return {**reply, "error": error}
    try:
        args = {
            name: ARGUMENTS[call, name](value) if (call, name) in ARGUMENTS else value
            for name, value in message.get("args", {}).items()
        }
        result = plain(method(**args))
        if call == "hello":
            result = {"protocol": PROTOCOL, **result}
        return {**reply, "result": result}
    except Exception as error:
        detail = {
            "kind": kind_of(call, error),
            "message": message_of(error),
            "traceback": traceback.format_exc(),
        }
        return {**reply, "error": detail}


def load(name: str) -> Any:
    """The factory that `MODULE:FACTORY` or `FILE.py:FACTORY` names.

    A file may import its neighbours as `from .neighbour import ...`; they are not on `sys.path`,
    where they could stand before modules of the engine.
    """
    source, _, factory = name.rpartition(":")
    if not source:
        raise SystemExit(f"--adapter {name!r}: expected MODULE:FACTORY or FILE.py:FACTORY")
    if source.endswith(".py"):
        folder = os.path.dirname(os.path.abspath(source))
        spec = importlib.util.spec_from_file_location(
            "conformance_adapter", source, submodule_search_locations=[folder]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    return getattr(module, factory)


def option(text: str) -> Any:
    """`key=value` as a pair; the value is JSON if it can be read as such, else a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def take_stdout() -> TextIO:
    """The pipe of the protocol; whatever else is printed, by C code too, goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return pipe


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve an adapter over JSON lines.")
    parser.add_argument("--adapter", required=True, metavar="MODULE:FACTORY|FILE.py:FACTORY")
    parser.add_argument("--path", action="append", default=[], help="put first on sys.path")
    parser.add_argument("--option", action="append", default=[], type=option, metavar="KEY=VALUE")
    arguments = parser.parse_args()
    # Python puts the folder of this file there, whose neighbours are not for the engine.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = arguments.path + [entry for entry in sys.path if os.path.abspath(entry) != here]
    replies = take_stdout()
    adapter = load(arguments.adapter)(**dict(arguments.option))
    for line in sys.stdin:
        if line.strip():
            replies.write(json.dumps(answer(adapter, json.loads(line))) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
