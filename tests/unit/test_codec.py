"""JSON into the protocol's values, and what is said of JSON that is none."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from nanovllm.conformance.codec import ProtocolError, decode
from nanovllm.conformance.host import plain
from nanovllm.conformance.protocol import (
    CacheStats,
    EngineRequest,
    EngineResult,
    Finished,
    Hello,
    Plan,
    PoolView,
    Published,
    RequestId,
    RequestOptions,
    Row,
    World,
)

VALUES = [
    Hello("e", "1", ("core",), frozenset({"pool", "abort"}), ahead=1),
    World(2, 4, eos_token_ids=(0, 1), hash="1bit", options={"policy": "mixed"}),
    RequestOptions(n=2, salt="red", stop_token_ids=(3,)),
    Plan(
        step=3,
        rows=(Row(RequestId(1, 2), 4, 2, (7, 8), "decode"),),
        preempted=(RequestId(3),),
        finished=(Finished(RequestId(4), "error"),),
        copies=((1, 2),),
    ),
    PoolView((1, 2), {0: 2}, (Published(0, (5, 6)), Published(3)), reserved=(4,)),
    PoolView((0,), {}),
    CacheStats(5, 2),
    EngineRequest((1, 2), {"temperature": 0.5, "stop": ["x"]}),
    EngineRequest("text", {}),
    EngineResult((1, 2), "ab", "stop", 4, (((1, -0.5), (2, -1.0)), ((2, -1.0),))),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_survives_the_pipe(value: Any) -> None:
    line = json.dumps(plain(value))
    assert decode(type(value), json.loads(line)) == value


def test_objects_may_be_lists_of_their_fields_and_an_id_a_number() -> None:
    short = [0, [[4, 0, 2, [1]]], [5], [[6, "stop"]]]
    assert decode(Plan, short) == Plan(
        0,
        (Row(RequestId(4), 0, 2, (1,)),),
        (RequestId(5),),
        (Finished(RequestId(6), "stop"),),
    )


def test_block_numbers_may_be_the_keys_of_an_object() -> None:
    assert decode(PoolView, {"free": [], "ref_counts": {"3": 1}}).ref_counts == {3: 1}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Plan, {"rows": []}, "result: a Plan has the fields .*; missing: step; unknown: none"),
        (Plan, {"step": 1, "row": []}, "missing: none; unknown: row"),
        (Plan, {"step": "1"}, r"result\.step: expected int, got '1'"),
        (Plan, {"step": True}, r"result\.step: expected int, got True"),
        (
            Plan,
            {"step": 1, "rows": [[0, 0, 1, [None]]]},
            r"rows\[0\]\.block_table\[0\]: expected int",
        ),
        (Plan, {"step": 1, "copies": [[1, 2, 3]]}, r"copies\[0\]: expected 2 items"),
        (
            Plan,
            {"step": 1, "preempted": [[1, 2, 3]]},
            r"preempted\[0\]: expected \[request, sample",
        ),
        (Plan, None, "expected a Plan, got None"),
        (PoolView, {"free": 3, "ref_counts": {}}, r"free: expected a list, got 3"),
        (PoolView, {"free": [], "ref_counts": [1]}, "expected an object or a list of pairs"),
        (PoolView, {"free": [], "ref_counts": {"x": 1}}, "ref_counts key: expected int, got 'x'"),
        (Mapping[str, int], {"a": None}, r"result\['a'\]: expected int, got None"),
        (
            World,
            {"block_size": 1, "num_blocks": 2, "hash": "md5"},
            "hash: expected one of real, cons",
        ),
        (int | None, "x", "expected int, got 'x'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(kind, value)
