"""The adapters that come with the suite, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import EMBEDDED_MODEL
from nanovllm.conformance.adapters import hf
from nanovllm.conformance.adapters.bare_import import find_engine, package_of
from nanovllm.conformance.adapters.reference import Reference
from nanovllm.conformance.codec import decode
from nanovllm.conformance.host import plain
from nanovllm.conformance.protocol import (
    EngineFault,
    EngineRequest,
    EngineResult,
    Finished,
    Plan,
    Published,
    Refused,
    RequestId,
    RequestOptions,
    Row,
    Unsupported,
    World,
)
from nanovllm.conformance.template import write_template
from nanovllm.conformance.transport import OpenDoor, local_door, open_door

ENGINES = Path(__file__).parents[1] / "conformance_engines"
WORLD = World(block_size=2, num_blocks=6, max_num_batched_tokens=8, eos_token_ids=(0,))
PLAIN = RequestOptions()


def complete(
    door: OpenDoor, request: int, prompt: tuple[int, ...], max_tokens: int, token: int = 5
) -> tuple[list[Plan], list[Finished]]:
    """One request with `token` as every output."""
    door.add(request, prompt, max_tokens, PLAIN)
    known, plans, finished = len(prompt), [], []
    while not finished:
        plan = door.schedule()
        tokens = {row.id: token for row in plan.rows if row.end == known}
        known += len(tokens)
        finished = door.commit(plan.step, tokens)
        plans.append(plan)
    return plans, finished


# ---- reference ---------------------------------------------------------------------------------


@pytest.fixture(params=["in-process", "subprocess"])
def reference(request: pytest.FixtureRequest) -> Iterator[OpenDoor]:
    with open_door("reference", transport=request.param) as door:
        door.reset(WORLD)
        yield door


@pytest.mark.spec("SCH-2", "SCH-7a", "SCH-7b")
def test_the_reference_refuses_and_says_why(reference: OpenDoor) -> None:
    with pytest.raises(Refused, match="max_num_batched_tokens=1 is below max_num_seqs=4"):
        reference.reset(replace(WORLD, max_num_batched_tokens=1))
    with pytest.raises(Refused, match="0 tokens"):
        reference.add(0, (), 1, PLAIN)
    with pytest.raises(Refused, match="max_tokens must be None or an integer >= 1, got 0"):
        reference.add(0, (1,), 0, PLAIN)


@pytest.mark.spec("BLK-4", "PFX-6", "SEQ-6")
def test_the_reference_tells_its_plans(reference: OpenDoor) -> None:
    plans, finished = complete(reference, 7, (1, 2, 3), 2)
    id = RequestId(7)
    assert plans[0].rows == (Row(id, 0, 3, (0, 1), "prefill"),)
    assert plans[1].rows == (Row(id, 3, 1, (0, 1), "decode"),)
    assert finished == [Finished(id, "length")]
    reference.add(8, (1, 2, 3, 5, 6), 1, PLAIN)
    plan = reference.schedule()
    assert plan.rows == (Row(RequestId(8), 4, 1, (0, 1, 2), "prefill"),)
    assert 0 < reference.wire(RequestId(8)) < 200
    view = reference.pool()
    assert sorted(view.free) == [3, 4, 5]
    assert view.ref_counts == {0: 1, 1: 1, 2: 1}
    assert view.published == (Published(0, (1, 2)), Published(1, (3, 5)))
    assert reference.stats().num_cached_tokens == 4


@pytest.mark.spec("SCH-13", "SCH-15", "FRK-3")
def test_the_reference_ends_all_samples_of_a_request(reference: OpenDoor) -> None:
    reference.add(1, (1, 2, 3), 4, RequestOptions(n=2))
    assert reference.abort(1)
    assert not reference.abort(1)
    assert not reference.abort(2)
    reference.add(2, (1, 2, 3), 4, RequestOptions(n=2))
    plan = reference.schedule()
    ended = reference.fail_step(plan.step)
    assert ended == [Finished(RequestId(2, i), "error") for i in range(2)]
    assert not reference.schedule().rows


@pytest.mark.spec("PFX-1", "PFX-2")
def test_the_reference_hashes_as_it_is_told(reference: OpenDoor) -> None:
    first = reference.hash((1, 2), None)
    assert reference.hash((1, 2), first) != first
    reference.reset(replace(WORLD, hash="constant"))
    assert reference.hash((1, 2), None) == reference.hash((3, 4), None)


@pytest.mark.spec("BLK-3", "PFX-3", "PFX-8")
def test_the_reference_has_the_blocks_door(reference: OpenDoor) -> None:
    assert reference.allocate(0, (1, 2, 3)) == ([0, 1], 0)
    assert reference.append(0, 4) == [0, 1]
    assert reference.lookup((1, 2, 3, 4)) == 4
    assert reference.allocate(1, tuple(range(20))) is None
    assert reference.allocate(2, (1, 2, 3, 9, 9, 9, 9, 9)) == ([0, 2, 3, 4], 2)
    assert reference.append(2, 9) == [0, 2, 3, 4, 5]
    assert reference.append(0, 9) is None
    reference.release(0)
    assert reference.lookup((1, 2, 3, 4)) == 4
    assert reference.pool().free == (1,)


@pytest.mark.spec("STP-4", "SCH-13", "SCH-7c")
def test_the_reference_generates() -> None:
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    with open_door("reference", transport="in-process") as door:
        with pytest.raises(Refused, match="kvcache_memory_gb"):
            door.open("", {"kvcache_memory_gb": 0})
        door.open(str(EMBEDDED_MODEL), {"num_kvcache_blocks": 16})
        requests = [EngineRequest("In the", params), EngineRequest((7, 8), {**params, "n": 2})]
        (text,), twins = door.generate(requests)
        assert len(text.token_ids) == 6
        assert len(twins) == 2
        assert "".join(door.stream(requests[0])) == text.text
        assert len(door.stream(requests[0], 1)) == 1
        with pytest.raises(Refused, match="temperature"):
            door.generate([EngineRequest("x", {"temperature": -1.0})])
        door.close()


# ---- the tutorial's classes ----------------------------------------------------------------------


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


# ---- black boxes ---------------------------------------------------------------------------------

VLLM = """
from types import SimpleNamespace as Object
__version__ = "0.0-fake"
class SamplingParams:
    def __init__(self, **given):
        if given.get("temperature", 1) < 0: raise ValueError("temperature is negative")
        self.given = given
class LLM:
    def __init__(self, model, **options): self.told = model, options
    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        pairs = zip(prompts, params)
        return [Object(num_cached_tokens=4, outputs=[self.sample(*pair)]) for pair in pairs]
    def sample(self, prompt, params):
        row = {9: Object(logprob=-2.0), 5: Object(logprob=-0.5)}
        text = str((self.told, prompt, params.given))
        return Object(token_ids=(5,), text=text, finish_reason="stop", logprobs=[row])
    def reset_prefix_cache(self): self.told = "reset"
"""


def test_vllm_is_told_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    with open_door("vllm", path=tmp_path) as door:
        assert door.hello().version == "0.0-fake"
        door.open("model", {"kvcache_block_size": 8, "max_num_seqs": 3})
        params: dict[str, Any] = {"include_stop": True, "seed": 1}
        ((result,),) = door.generate([EngineRequest((1, 2), params)])
        told = (("model", {"block_size": 8, "max_num_seqs": 3}), {"prompt_token_ids": [1, 2]})
        assert result.text == str((*told, {"include_stop_str_in_output": True, "seed": 1}))
        assert result.token_ids == (5,)
        assert result.logprobs == (((5, -0.5), (9, -2.0)),)
        assert result.num_cached_tokens == 4
        with pytest.raises(Refused, match="temperature is negative"):
            door.generate([EngineRequest("x", {"temperature": -1.0})])
        door.reset_prefix_cache()
        ((result,),) = door.generate([EngineRequest("x", {})])
        assert result.text == str(("reset", "x", {}))


@pytest.mark.spec("MOD-1", "SMP-6")
def test_transformers_agrees_with_the_reference() -> None:
    """Greedy tokens, and log probabilities within what float32 gives."""
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    requests = [EngineRequest("In the beginning", params)]
    results = []
    # Both in this process: another one would spend seconds on its imports.
    for door in (local_door(hf.adapter()), local_door(Reference())):
        door.open(str(EMBEDDED_MODEL), {"dtype": "float32", "num_kvcache_blocks": 8})
        results += decode(list[list[EngineResult]], plain(door.generate(requests)))
    (theirs,), (ours,) = results
    assert theirs.token_ids == ours.token_ids
    assert theirs.text == ours.text
    assert theirs.finish_reason == ours.finish_reason == "length"
    assert theirs.logprobs is not None
    assert ours.logprobs is not None
    for their_row, our_row in zip(theirs.logprobs, ours.logprobs, strict=True):
        assert dict(our_row) == pytest.approx(dict(their_row), abs=1e-4)


# ---- the template --------------------------------------------------------------------------------


def test_the_template_fits_an_engine_with_its_names(tmp_path: Path) -> None:
    """Preemption included: 3 blocks of 2 do not hold two requests of 4 slots."""
    target = tmp_path / "adapter.py"
    write_template(target)
    assert f"--engine {target}:adapter" in target.read_text()
    with pytest.raises(FileExistsError):
        write_template(target)
    with open_door(f"{target}:adapter", path=ENGINES) as door:
        door.reset(replace(WORLD, num_blocks=3))
        plans, finished = complete(door, 0, (1, 2, 3), 2)
        assert [plan.rows[0].count for plan in plans] == [3, 1]
        assert finished == [Finished(RequestId(0), "length")]
        door.add(1, (1, 2), 3, PLAIN)
        door.add(2, (3, 4), 3, PLAIN)
        plan = door.schedule()
        door.commit(plan.step, {row.id: 6 for row in plan.rows})
        assert door.schedule().preempted == (RequestId(2),)
        with pytest.raises(Unsupported):
            door.add(3, (1, 2), 3, RequestOptions(n=2))
        with pytest.raises(Refused):
            door.add(3, (), 3, PLAIN)
