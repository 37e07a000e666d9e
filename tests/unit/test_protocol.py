"""The session of docs/protocol.md is what happens."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanovllm.conformance.codec import decode
from nanovllm.conformance.host import CALLS, answer, plain
from nanovllm.conformance.pipe import LinePipe
from nanovllm.conformance.protocol import CacheStats, Finished, Hello, Plan, PoolView
from nanovllm.conformance.transport import open_door

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
ENGINE = ROOT / "tests" / "conformance_engines" / "engine.mjs"

KINDS = {
    "hello": Hello,
    "schedule": Plan,
    "commit": list[Finished],
    "pool": PoolView,
    "stats": CacheStats,
}


def session() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Questions and answers, in order."""
    (block,) = re.findall(r"```session\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = block.splitlines()
    assert [line[:2] for line in lines] == ["> ", "< "] * (len(lines) // 2)
    messages = [json.loads(line[2:]) for line in lines]
    return list(zip(messages[::2], messages[1::2], strict=True))


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_the_session_is_what_the_engine_answers() -> None:
    pipe = LinePipe(["node", str(ENGINE)])
    for question, reply in session():
        line = json.dumps(question).encode() + b"\n"
        assert json.loads(pipe.exchange(line, timeout_s=60)) == reply


def test_the_reference_answers_the_same() -> None:
    """Except for who it is, for what it offers beyond, and for words and phases."""
    with open_door("reference", transport="in-process") as door:
        for question, reply in session():
            call, args = question["call"], question["args"]
            if call == "reset":
                args["world"]["options"] = {"policy": "mixed"}
            if call in ("hello", "hash"):
                continue
            ours = json.loads(json.dumps(answer(door, question)))
            if "error" in reply:
                assert ours["error"]["kind"] == reply["error"]["kind"]
            else:
                kind = KINDS.get(call, Any)
                told = decode(kind, ours["result"])
                assert _without_phase(told) == decode(kind, reply["result"])


def _without_phase(value: Any) -> Any:
    if not isinstance(value, Plan):
        return value
    json = plain(value)
    for row in json["rows"]:
        row["phase"] = None
    return decode(Plan, json)


def test_the_page_names_every_call_and_error() -> None:
    for call in CALLS:
        assert f"`{call}(" in PAGE
    for kind in ("refused", "unsupported", "fault"):
        assert f"| `{kind}` |" in PAGE
    for name, kind in {**KINDS, "hello": Hello}.items():
        if hasattr(kind, "__dataclass_fields__"):
            row = next(line for line in PAGE.splitlines() if line.startswith(f"| {kind.__name__} "))
            assert re.findall(r"`(\w+)`", row)[: len(kind.__dataclass_fields__)] == list(
                kind.__dataclass_fields__
            ), name
