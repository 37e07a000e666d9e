"""`host.py`: what an adapter may return and raise, and what the engine's process looks like."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.conformance import host, protocol
from nanovllm.conformance.transport import open_door


@dataclasses.dataclass
class Pair:
    left: int
    right: Any


class Refused(Exception):  # noqa: N818  # as an adapter would write it
    pass


class Adapter:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def hello(self) -> dict[str, Any]:
        return {"engine": "e", "version": "1", "doors": ["core"]}

    def add(self, **given: Any) -> None:
        self.given = given
        raise given["prompt"][0]

    def commit(self, **given: Any) -> list[Any]:
        self.given = given
        return [Pair((1, 0), "stop")]

    def secret(self) -> str:
        return "not a call of the protocol"


def test_it_is_one_file_of_the_standard_library() -> None:
    tree = ast.parse(Path(host.__file__).read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "name",
    ["host", *(f"adapters/{n}" for n in ("bare_import", "nanovllm_like", "tutorial_calls"))],
)
def test_an_older_interpreter_can_read_it(name: str) -> None:
    """An engine's interpreter need not be as new as ours."""
    source = (Path(host.__file__).parent / f"{name}.py").read_text()
    ast.parse(source, feature_version=(3, 8))


def test_it_speaks_the_protocol_of_this_package() -> None:
    doors = (protocol.BlocksDoor, protocol.CoreDoor, protocol.EngineDoor)
    calls = {name for door in doors for name in vars(door) if not name.startswith("_")}
    assert set(host.CALLS) == calls
    assert host.PROTOCOL == protocol.PROTOCOL


@pytest.mark.parametrize(
    ("value", "json"),
    [
        (Pair(1, (2, 3)), {"left": 1, "right": [2, 3]}),
        ({"a": {1, 3, 2}}, {"a": [1, 2, 3]}),
        ({2: "b", 1: "a"}, [[2, "b"], [1, "a"]]),
        ({(0, 1): 5}, [[[0, 1], 5]]),
        ({}, {}),
        (np.arange(3), [0, 1, 2]),
        (np.int64(3), 3),
        (range(2), [0, 1]),
        ((None, True, 1.5, "x"), [None, True, 1.5, "x"]),
    ],
)
def test_any_python_value_becomes_json(value: Any, json: Any) -> None:
    assert host.plain(value) == json


def test_arguments_come_as_objects_tuples_and_dictionaries() -> None:
    adapter = Adapter()
    message = {"id": 3, "call": "commit", "args": {"step": 1, "tokens": [[[4, 0], 9]]}}
    reply = host.answer(adapter, message)
    assert adapter.given == {"step": 1, "tokens": {(4, 0): 9}}
    assert reply == {"id": 3, "result": [{"left": [1, 0], "right": "stop"}]}
    args = {"prompt": [KeyError("x")], "options": {"n": 2}}
    host.answer(adapter, {"id": 4, "call": "add", "args": args})
    assert adapter.given["options"].n == 2


@pytest.mark.spec("SCH-7a")
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("0 tokens"), "refused", "ValueError: 0 tokens"),
        (Refused("0 tokens"), "refused", "0 tokens"),
        (NotImplementedError("no n"), "unsupported", "NotImplementedError: no n"),
        (AssertionError(), "fault", "AssertionError"),
        (KeyError("x"), "fault", "KeyError: 'x'"),
    ],
)
def test_exceptions_are_told_by_their_kind(error: Exception, kind: str, message: str) -> None:
    reply = host.answer(Adapter(), {"id": 1, "call": "add", "args": {"prompt": [error]}})
    assert reply["error"]["kind"] == kind
    assert reply["error"]["message"] == message
    assert "Traceback" in reply["error"]["traceback"]


def test_a_value_error_outside_of_requests_is_a_fault() -> None:
    assert host.kind_of("schedule", ValueError()) == "fault"


@pytest.mark.parametrize("call", ["pool", "secret", "__init__", ""])
def test_what_is_no_call_is_unsupported(call: str) -> None:
    assert host.answer(Adapter(), {"id": 1, "call": call})["error"]["kind"] == "unsupported"


def test_options_are_json_or_text() -> None:
    assert host.option("a=1") == ("a", 1)
    assert host.option("a=[1, 2]") == ("a", [1, 2])
    assert host.option("a=b=c") == ("a", "b=c")


ENGINE = """
import os, sys
from .neighbour import NAME
class Adapter:
    def __init__(self, options): self.options = options
    def hello(self):
        print("printed")
        os.write(1, b"written\\n")
        return {"engine": NAME, "version": str(self.options), "doors": []}
    def hash(self, token_ids, parent): return "\\n".join(sys.path)
def adapter(**options): return Adapter(options)
"""


@pytest.fixture
def engine(tmp_path: Path) -> str:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "neighbour.py").write_text('NAME = "next door"')
    return f"{tmp_path / 'engine.py'}:adapter"


def test_the_pipe_is_the_protocols_alone(engine: str, tmp_path: Path) -> None:
    with open_door(engine, options={"size": 3, "kind": "a b"}) as door:
        hello = door.hello()
        assert hello.engine == "next door"
        assert hello.version == str({"size": 3, "kind": "a b"})
        path = door.hash((), None).split("\n")
    assert path[0] == str(tmp_path)
    assert str(Path(host.__file__).parent) not in path


def test_a_wrong_command_line_says_what_is_expected() -> None:
    command = [sys.executable, host.__file__, "--adapter", "nonsense"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode != 0
    assert "expected MODULE:FACTORY or FILE.py:FACTORY" in done.stderr
