"""The adapters that come with the suite, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plain_requests import ENGINES, PLAIN, WORLD, complete

from nanovllm.config import EMBEDDED_MODEL
from nanovllm.conformance.adapters import hf
from nanovllm.conformance.adapters.reference import Reference
from nanovllm.conformance.codec import decode
from nanovllm.conformance.host import plain
from nanovllm.conformance.protocol import (
    EngineRequest,
    EngineResult,
    Finished,
    Published,
    Refused,
    RequestId,
    RequestOptions,
    Row,
    Unsupported,
)
from nanovllm.conformance.template import write_template
from nanovllm.conformance.transport import OpenDoor, local_door, open_door

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
