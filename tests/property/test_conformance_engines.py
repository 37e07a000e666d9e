"""Engines that are not the reference, at the core door: in another language, from the template."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from nanovllm.conformance.protocol import CORE_CAPABILITIES
from nanovllm.conformance.runner import run_core
from nanovllm.conformance.template import write_template
from nanovllm.conformance.transport import OpenDoor, open_door
from nanovllm.conformance.verdicts import Outcome, Verdict

ENGINES = Path(__file__).parents[1] / "conformance_engines"
LACKED = {"cow", "hash", "hash_override", "n", "wire"}


def judge(door: OpenDoor) -> list[Verdict]:
    with door:
        return run_core(lambda: door, profile="dev", seed=0)


def failures(verdicts: list[Verdict]) -> list[str]:
    fine = (Outcome.PASS, Outcome.UNSUPPORTED, Outcome.NOT_EXERCISED)
    return [f"{v.spec_id}: {v.message}" for v in verdicts if v.outcome not in fine]


@pytest.mark.spec("SCH-6", "BLK-8", "PFX-2")
@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_an_engine_in_another_language_passes() -> None:
    door = open_door(f"cmd:node {ENGINES / 'engine.mjs'}")
    assert door.hello().capabilities == CORE_CAPABILITIES - LACKED
    verdicts = judge(door)
    assert failures(verdicts) == []
    assert sum(v.outcome is Outcome.PASS for v in verdicts) >= 40


@pytest.mark.spec("SCH-6", "SCH-8", "BLK-8")
def test_the_smallest_engine_passes_through_the_template(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    write_template(adapter)
    door = open_door(f"{adapter}:adapter", path=ENGINES)
    assert door.hello().capabilities == frozenset()
    verdicts = judge(door)
    assert failures(verdicts) == []
    assert sum(v.outcome is Outcome.PASS for v in verdicts) >= 20


@pytest.mark.spec("SCH-6")
def test_both_transports_give_the_same_verdicts() -> None:
    reference = partial(open_door, "reference")
    inside, outside = (judge(reference(transport=t)) for t in ("in-process", "subprocess"))
    assert inside == outside
    assert failures(inside) == []


@pytest.mark.spec("PFX-2", "PFX-6", "PFX-7", "SCH-3")
def test_the_tutorials_defects_are_found_in_an_engine_that_has_them() -> None:
    """Looked up by a block's own tokens, to the last one, and never forgotten; seats per step."""
    defects = {"PFX-2", "PFX-6", "PFX-7", "SCH-3"}
    with open_door("nanovllm_like", path=ENGINES / "nano_2025") as door:
        verdicts = run_core(lambda: door, profile="mutation", seed=0, requirements=defects)
    assert {v.spec_id for v in verdicts if v.outcome is Outcome.FAIL} == defects
