"""The adapter for packages with the tutorial's classes, on two small ones of its generations."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plain_requests import ENGINES, PLAIN, WORLD, complete

from nanovllm.conformance.adapters.bare_import import find_engine, package_of
from nanovllm.conformance.protocol import (
    EngineFault,
    Finished,
    Refused,
    RequestId,
    RequestOptions,
    Unsupported,
)
from nanovllm.conformance.transport import OpenDoor, open_door


@pytest.fixture(params=["2025", "2026"])
def tutorial(request: pytest.FixtureRequest) -> Iterator[OpenDoor]:
    """An engine with each generation's calls; the package of one cannot be imported at all."""
    with open_door("nanovllm_like", path=ENGINES / f"nano_{request.param}") as door:
        assert door.hello().version == f"as of {request.param}"
        door.reset(WORLD)
        yield door


@pytest.mark.spec("BLK-5", "PFX-16")
def test_both_generations_show_their_plans(tutorial: OpenDoor) -> None:
    plans, finished = complete(tutorial, 0, (1, 2, 3), 3)
    assert [(row.start, row.count) for plan in plans for row in plan.rows] == [
        (0, 3),
        (3, 1),
        (4, 1),
    ]
    assert finished == [Finished(RequestId(0), "length")]
    plans, finished = complete(tutorial, 1, (1, 2, 9), 3, token=0)
    assert [(row.start, row.count) for row in plans[0].rows] == [(2, 1)]
    assert finished == [Finished(RequestId(1), "stop")]


@pytest.mark.spec("SCH-8")
def test_both_generations_tell_who_was_preempted(tutorial: OpenDoor) -> None:
    tutorial.reset(replace(WORLD, num_blocks=3))
    tutorial.add(4, (1, 2), 3, PLAIN)
    tutorial.add(5, (3, 4), 3, PLAIN)
    plan = tutorial.schedule()
    tutorial.commit(plan.step, {row.id: 6 for row in plan.rows})
    plan = tutorial.schedule()
    assert [row.id for row in plan.rows] == [RequestId(4)]
    assert plan.preempted == (RequestId(5),)
    assert tutorial.wire(RequestId(4)) > 0


@pytest.mark.spec("BLK-1", "BLK-3", "PFX-8")
def test_both_generations_have_the_blocks_door(tutorial: OpenDoor) -> None:
    assert tutorial.allocate(0, (1, 2, 3)) == ([0, 1], 0)
    assert tutorial.append(0, 4) == [0, 1]
    before = tutorial.pool()
    assert tutorial.lookup((1, 2, 3)) == 2
    assert tutorial.allocate(1, tuple(range(20))) is None
    assert tutorial.pool() == before
    assert tutorial.allocate(2, (1, 2, 7, 7, 7, 7, 7)) == ([0, 2, 3, 4], 2)
    assert tutorial.append(2, 7) == [0, 2, 3, 4]
    assert tutorial.append(2, 7) == [0, 2, 3, 4, 5]
    assert tutorial.append(0, 9) is None
    tutorial.release(2)
    assert tutorial.append(0, 9) is not None
    tutorial.release(0)
    assert sorted(tutorial.pool().free) == list(range(6))
    assert tutorial.lookup((1, 2)) == 2


@pytest.mark.spec("PFX-1", "PFX-2")
def test_the_hash_of_both_generations_can_be_replaced(tutorial: OpenDoor) -> None:
    first = tutorial.hash((1, 2), None)
    assert len({first, tutorial.hash((1, 3), None), tutorial.hash((1, 2), first)}) == 3
    tutorial.reset(replace(WORLD, hash="constant"))
    assert tutorial.hash((1, 2), None) == tutorial.hash((3, 4), None)
    tutorial.reset(WORLD)
    assert tutorial.hash((1, 2), None) == first


@pytest.mark.spec("PFX-12")
def test_the_cache_of_both_generations_can_be_turned_off(tutorial: OpenDoor) -> None:
    tutorial.reset(replace(WORLD, prefix_cache=False))
    for request in range(2):
        plans, _ = complete(tutorial, request, (1, 2, 3, 4, 5), 2)
        assert plans[0].rows[0].start == 0
    assert tutorial.pool().published == ()


def test_what_the_tutorial_does_not_have_is_unsupported(tutorial: OpenDoor) -> None:
    for options in (RequestOptions(n=2), RequestOptions(salt="x"), RequestOptions(min_tokens=1)):
        with pytest.raises(Unsupported):
            tutorial.add(0, (1, 2), 2, options)
    with pytest.raises(Unsupported):
        tutorial.reset(replace(WORLD, eos_token_ids=(0, 1)))
    with pytest.raises(Unsupported):
        tutorial.abort(0)


@pytest.mark.spec("SCH-5")
def test_an_idle_engine_need_not_be_asked() -> None:
    """The later generation asserts that there is something to do; its own loop never asks."""
    with open_door("nanovllm_like", path=ENGINES / "nano_2026") as door:
        door.reset(WORLD)
        with pytest.raises(EngineFault, match=r"AssertionError"):
            door.schedule()
    options = {"asks_when_idle": False}
    with open_door("nanovllm_like", path=ENGINES / "nano_2026", options=options) as door:
        door.reset(WORLD)
        assert not door.schedule().rows
        complete(door, 0, (1, 2, 3), 2)
        assert not door.schedule().rows
    with open_door("nanovllm_like", path=ENGINES / "nano_2025") as door:
        door.reset(WORLD)
        assert not door.schedule().rows


@pytest.mark.spec("BLK-5")
def test_worlds_of_small_blocks_can_be_left_out() -> None:
    options = {"min_block_size": 2}
    with open_door("nanovllm_like", path=ENGINES / "nano_2026", options=options) as door:
        with pytest.raises(Unsupported, match="block_size=1"):
            door.reset(replace(WORLD, block_size=1))
        door.reset(replace(WORLD, block_size=2))


@pytest.mark.spec("PFX-2")
def test_colliding_hashes_can_be_left_out() -> None:
    options = {"hash_override": False}
    with open_door("nanovllm_like", path=ENGINES / "nano_2026", options=options) as door:
        assert "hash_override" not in door.hello().capabilities
        assert "hash" in door.hello().capabilities


def test_a_fork_finds_its_own_fields_in_the_config(tmp_path: Path) -> None:
    """As the engine's config fills them in, unless the user gives another value."""
    shutil.copytree(ENGINES / "nano_2026", tmp_path, dirs_exist_ok=True)
    config = tmp_path / "nanovllm" / "config.py"
    config.write_text(config.read_text() + "    seats_left_free: int = 1\n")
    scheduler = tmp_path / "nanovllm" / "engine" / "scheduler.py"
    seats, fewer = "= config.max_num_seqs\n", "= config.max_num_seqs - config.seats_left_free\n"
    scheduler.write_text(scheduler.read_text().replace(seats, fewer))
    for options, rows in ({}, WORLD.max_num_seqs - 1), ({"seats_left_free": 0}, WORLD.max_num_seqs):
        with open_door("nanovllm_like", path=tmp_path, options=options) as door:
            door.reset(WORLD)
            for request in range(WORLD.max_num_seqs):
                door.add(request, (1, 2), 2, PLAIN)
            assert len(door.schedule().rows) == rows


@pytest.mark.spec("SCH-14")
def test_the_later_generation_computes_a_prompt_in_chunks() -> None:
    with open_door("nanovllm_like", path=ENGINES / "nano_2026") as door:
        assert "chunked_prefill" in door.hello().capabilities
        door.reset(replace(WORLD, max_num_batched_tokens=4))
        plans, _ = complete(door, 0, (1, 2, 3, 4, 5, 6), 1)
        assert [row.count for plan in plans for row in plan.rows] == [4, 2]


@pytest.mark.spec("SCH-7b")
def test_the_engines_own_parameters_refuse() -> None:
    with open_door("nanovllm_like", path=ENGINES / "nano_2026") as door:
        door.reset(WORLD)
        with pytest.raises(Refused, match="max_tokens is 0"):
            door.add(0, (1, 2), 0, PLAIN)


def test_the_uppermost_engine_that_is_not_hidden_is_taken(tmp_path: Path) -> None:
    for folder in (".venv/site", "a/engine", "b/c/engine", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "block_manager.py").touch()
    with pytest.raises(FileNotFoundError, match="no block_manager"):
        find_engine(tmp_path)
    for folder in (".venv/site", "a/engine", "b/c/engine"):
        (tmp_path / folder / "sequence.py").touch()
    assert find_engine(tmp_path) == tmp_path / "a" / "engine"


def test_a_package_is_called_what_its_modules_call_it(tmp_path: Path) -> None:
    assert package_of(ENGINES / "nano_2026" / "nanovllm" / "engine") == "nanovllm.engine"
    (tmp_path / "scheduler.py").write_text("from sequence import Sequence\n")
    assert package_of(tmp_path) == ""
