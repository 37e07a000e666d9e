"""Each check of the core door convicts what it is for, and says nothing of a right engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from bent_door import Bend, bent, reference

from nanovllm.conformance.checks import CHECKS
from nanovllm.conformance.examination import examine
from nanovllm.conformance.protocol import (
    CacheStats,
    EngineFault,
    Plan,
    PoolView,
    Published,
    Refused,
    World,
)
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.runner import drawn

Call = Callable[[], Any]


def of_plans(change: Callable[[Plan], Plan]) -> Bend:
    """Bends plans with rows."""

    def bend(call: Call) -> Plan:
        plan = call()
        return change(plan) if plan.rows else plan

    return bend


def of_pools(change: Callable[[PoolView], PoolView]) -> Bend:
    return lambda call: change(call())


def of_worlds(**limits: Any) -> Bend:
    return lambda world: replace(world, **limits)


def first_row(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, rows=(replace(plan.rows[0], **changes), *plan.rows[1:]))


def taken(call: Call) -> None:
    with suppress(Refused):
        call()


def crash(call: Call) -> Any:
    call()
    raise EngineFault("AssertionError")


def other_content(pool: PoolView) -> PoolView:
    entries = (Published(e.block, tuple(t + 1 for t in e.token_ids or ())) for e in pool.published)
    return replace(pool, published=tuple(entries))


CASES: list[tuple[str, dict[str, Bend]]] = [
    ("BLK-1", {"pool": of_pools(lambda p: replace(p, free=(*p.free, *p.free[:1])))}),
    ("BLK-1", {"pool": of_pools(lambda p: replace(p, free=p.free[1:]))}),
    ("BLK-1", {"pool": crash}),
    ("BLK-2", {"pool": of_pools(lambda p: replace(p, ref_counts=dict.fromkeys(p.ref_counts, 1)))}),
    ("BLK-4", {"schedule": of_plans(lambda p: first_row(p, block_table=()))}),
    ("BLK-4", {"schedule": of_plans(lambda p: first_row(p, block_table=tuple(range(99))))}),
    ("BLK-6", {"world": lambda w: replace(w, num_blocks=w.num_blocks - 1)}),
    ("BLK-8", {"schedule": of_plans(lambda p: replace(p, rows=tuple(
        replace(row, block_table=p.rows[0].block_table) for row in p.rows)))}),
    ("KV-5", {"schedule": of_plans(lambda p: first_row(p, start=p.rows[0].start + 1, count=1))}),
    ("KV-7", {"schedule": of_plans(lambda p: first_row(p, count=p.rows[0].count + 99))}),
    ("PFX-1", {"hash": lambda call: "00"}),
    ("PFX-3", {"pool": of_pools(lambda p: replace(
        p, published=tuple(Published(b) for b in p.ref_counts)))}),
    ("PFX-7", {"pool": of_pools(other_content)}),
    ("PFX-8", {"world": of_worlds(prefix_cache=False)}),
    ("PFX-11", {"world": of_worlds(prefix_cache=False)}),
    ("PFX-13", {"world": of_worlds(prefix_cache=False)}),
    ("PFX-16", {"pool": of_pools(lambda p: replace(p, published=()))}),
    ("PFX-17", {"stats": lambda call: CacheStats(0, call().num_cached_tokens + 50)}),
    ("SCH-2", {"world": of_worlds(max_num_batched_tokens=64)}),
    ("SCH-3", {"world": lambda w: replace(
        w, max_num_seqs=9, max_num_batched_tokens=max(9, w.max_num_batched_tokens))}),
    ("SCH-4", {"schedule": of_plans(lambda p: replace(p, rows=(*p.rows, p.rows[0])))}),
    ("SCH-5", {"schedule": crash}),
    ("SCH-6", {"commit": crash}),
    ("SCH-6", {"schedule": lambda call: Plan(0)}),
    ("SCH-7a", {"add": taken}),
    ("SCH-7a", {"world": of_worlds(max_model_len=4)}),
    ("SCH-7b", {"add": taken}),
    ("SCH-8", {"schedule": of_plans(lambda p: replace(p, preempted=(p.rows[0].id,)))}),
    ("SCH-12a", {"world": of_worlds(eos_token_ids=())}),
    ("SCH-12b", {"commit": lambda call: [end for end in call() if end.reason != "length"]}),
    ("SCH-12c", {"commit": lambda call: [end for end in call() if end.reason != "stop"]}),
    ("SCH-12d", {"commit": lambda call: [replace(end, reason="abort") for end in call()]}),
    ("SCH-13", {"abort": lambda call: call() or True}),
    ("SCH-15", {"fail_step": lambda call: [replace(e, reason="length") for e in call()]}),
    ("SCH-15", {"fail_step": crash}),
    ("STP-2", {"add": taken}),
]  # fmt: skip


@pytest.mark.parametrize(("spec_id", "bends"), CASES)
def test_what_is_wrong_is_convicted(spec_id: str, bends: dict[str, Bend]) -> None:
    door = bent(**bends)
    hello = door.hello()
    examples = [drawn(hello, 1, i, {}) for i in range(30)]
    result = examine(door, hello, examples, {spec_id})
    assert not result.errors
    _, violation = result.failures[spec_id]
    assert violation.spec_id == spec_id
    assert violation.message


def test_right_engine_is_not_convicted() -> None:
    door = reference()
    examples = [drawn(door.hello(), 1, i, {}) for i in range(30)]
    result = examine(door, door.hello(), examples)
    assert (result.failures, result.errors) == ({}, {})


def test_checks_name_requirements_and_need_their_capabilities() -> None:
    registry = load_registry()
    for check in CHECKS:
        assert set(registry[check.spec_id].capabilities) <= check.needs, check


def test_a_failure_hides_no_other() -> None:
    """Statistics are wrong from the first hit on, the reason only at an end."""
    door = bent(
        stats=lambda call: CacheStats(0, -1),
        abort=lambda call: call() or True,
        commit=lambda call: [replace(end, reason="abort") for end in call()],
    )
    examples = [drawn(door.hello(), 1, i, {}) for i in range(30)]
    result = examine(door, door.hello(), examples)
    assert {"PFX-17", "SCH-12d", "SCH-13"} <= result.failures.keys()
    assert "BLK-2" not in result.failures
    assert result.counts["BLK-2"] > 1000


def test_a_world_that_is_refused_is_no_failure() -> None:
    def no(world: World) -> World:
        raise Refused("blocks of 256 tokens only")

    door = bent(world=no)
    result = examine(door, door.hello(), [drawn(door.hello(), 0, 0, {})])
    assert (result.failures, result.errors, +result.counts) == ({}, {}, {})
