"""Doors of other programs: names, time limits, deaths, restarts."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm.conformance.codec import ProtocolError
from nanovllm.conformance.pipe import LinePipe
from nanovllm.conformance.protocol import EngineFault, Refused, RequestOptions, Unsupported, World
from nanovllm.conformance.remote import RemoteDoor
from nanovllm.conformance.transport import command_line, local_door, open_door

WORLD = World(block_size=2, num_blocks=4)

PROGRAM = """
import json, os, subprocess, sys, time
def say(text): os.write(1, text.encode())
for line in sys.stdin:
    message = json.loads(line)
    call, args, reply = message["call"], message.get("args"), {"id": message["id"]}
    if call == "stats": os._exit(3)
    if call == "pool": time.sleep(3600)
    if call == "schedule": say("not json\\n"); continue
    if call == "abort": reply["id"] += 1
    if call == "hash":
        child = subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL)
        reply["result"] = str(child.pid)
    elif call == "wire": reply["result"] = len(line)
    elif call == "lookup": reply["result"] = len(args["token_ids"])
    elif call == "close": reply["error"] = {"kind": "unheard of", "message": "x"}
    else: reply["result"] = None
    print("a word to stderr", file=sys.stderr)
    say(json.dumps(reply)[:5]); say(json.dumps(reply)[5:] + "\\n")
"""


@pytest.fixture
def door(tmp_path: Path) -> Any:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with RemoteDoor([sys.executable, str(program)], timeout_s=30.0) as door:
        yield door


def alive(pid: int) -> bool:
    """Whether the process runs; one that was killed may wait to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_death_is_a_fault_with_the_last_words_and_a_reset_starts_anew(door: RemoteDoor) -> None:
    door.reset(WORLD)
    with pytest.raises(EngineFault, match=r"stats: .*; exit code 3: a word to stderr\n"):
        door.stats()
    with pytest.raises(EngineFault, match="pool: the program has ended; reset or open it first"):
        door.pool()
    door.reset(WORLD)
    assert door.lookup((1, 2, 3)) == 3


def test_silence_is_a_fault_and_kills_the_children_too(door: RemoteDoor) -> None:
    door.reset(WORLD)
    child = int(door.hash((), None))
    assert alive(child)
    door.timeout_s = 0.2
    with pytest.raises(EngineFault, match=r"pool: no answer within 0\.2 s"):
        door.pool()
    for _ in range(10_000):
        if not alive(child):
            break
        os.sched_yield()
    assert not alive(child)


def test_the_first_call_has_time_to_start_a_program(door: RemoteDoor) -> None:
    door.timeout_s, door.slow_timeout_s = 1e-9, 30.0
    door.reset(WORLD)
    with pytest.raises(EngineFault, match="pool: no answer"):
        door.pool()


def test_a_line_longer_than_the_pipe_arrives_whole(door: RemoteDoor) -> None:
    tokens = tuple(range(200_000))
    assert door.lookup(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        ("schedule", (), "schedule: no JSON object with result or error: b'not json'"),
        ("abort", (0,), r"abort: the answer to 2 has the id 3"),
        ("lookup", ([],), None),
        ("hello", (), "hello: expected a Hello, got None"),
        ("close", (), "an error of unknown kind 'unheard of': x"),
    ],
)
def test_what_is_not_of_the_protocol_is_not_the_engines_fault(
    door: RemoteDoor, call: str, args: tuple[Any, ...], message: str | None
) -> None:
    door.reset(WORLD)
    if message is None:
        assert getattr(door, call)(*args) == 0
        return
    with pytest.raises(ProtocolError, match=message):
        getattr(door, call)(*args)


def test_a_program_that_is_not_there_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="cannot start no-such-program"):
        RemoteDoor(["no-such-program"]).hello()


def test_no_engine_outlives_its_door() -> None:
    pipe = LinePipe([sys.executable, "-c", "input()"])
    pid = pipe._process.pid
    assert alive(pid)
    del pipe
    assert not alive(pid)


def answers(tmp_path: Path, result: Any) -> RemoteDoor:
    program = f"print({json.dumps(json.dumps({'id': 1, 'result': result}))}); input(); input()"
    return RemoteDoor([sys.executable, "-c", program])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"protocol": 2}, "hello: protocol 2; this suite speaks 1"),
        ({"capabilities": ["fly"]}, "hello: unknown capabilities fly; there are abort, "),
    ],
)
def test_a_hello_that_means_something_else_is_not_taken(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    hello = {"engine": "e", "version": "1", "doors": ["core"], **changed}
    with answers(tmp_path, hello) as door, pytest.raises(ProtocolError, match=message):
        door.hello()


class InProcess:
    def add(self, request: int, prompt: Any, max_tokens: int, options: Any) -> None:
        raise prompt[0]


@pytest.mark.spec("SCH-7a")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("0 tokens"), Refused),
        (Refused("0 tokens"), Refused),
        (Unsupported("0 tokens"), Unsupported),
        (AssertionError("0 tokens"), EngineFault),
    ],
)
def test_in_this_process_exceptions_are_told_as_through_a_pipe(
    error: Exception, told: type[Exception]
) -> None:
    door = local_door(InProcess())
    with pytest.raises(told, match="0 tokens"):
        door.add(0, [error], 1, RequestOptions())  # type: ignore[list-item]
    with pytest.raises(Unsupported, match="the adapter has no 'pool'"):
        door.pool()


def test_engines_have_names(tmp_path: Path) -> None:
    file = tmp_path / "adapter.py"
    file.touch()
    assert command_line("cmd:node 'my engine.mjs' -x") == ["node", "my engine.mjs", "-x"]
    by_path = command_line(f"{file}:make", python="/usr/bin/python3", options={"a": "b", "n": 1})
    assert by_path[0] == "/usr/bin/python3"
    where = ["--path", str(tmp_path)]
    options = ["--option", 'a="b"', "--option", "n=1"]
    assert by_path[2:] == ["--adapter", f"{file}:make", *where, *options]
    by_module = command_line("pkg.module:make", path=tmp_path)
    assert by_module[2:] == ["--adapter", "pkg.module:make", *where]
    for name in ("nanovllm_like", "hf", "vllm"):
        adapter = command_line(name, path=tmp_path)[3].rpartition(":")[0]
        assert Path(adapter).is_file()
    with pytest.raises(ValueError, match="which path"):
        command_line("nanovllm_like")


@pytest.mark.parametrize("name", ["nonsense", ":make", "module:", "no_such_file.py:make"])
def test_an_unknown_engine_is_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="no engine"):
        open_door(name)


def test_only_the_reference_runs_in_this_process() -> None:
    with pytest.raises(ValueError, match="'hf' runs in its own process"):
        open_door("hf", transport="in-process")
