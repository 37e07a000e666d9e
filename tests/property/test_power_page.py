"""The page of what was measured tells shortfalls, and replaces only what stands between markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanovllm.conformance.faults import FAULTS
from nanovllm.conformance.power_page import BEGIN, END, failures, page, put

FAULT = FAULTS["map-only-grows"]


def trial(by: list[str]) -> dict[str, Any]:
    own = {"spec_id": FAULT.convicts, "operations": 3, "message": "one entry too many"}
    return {
        "fault": FAULT.name,
        "convicts": FAULT.convicts,
        "own": own if by else None,
        "by": by,
        "seconds": 2.0,
    }


def measured(by: list[str], drawn: list[bool], alarms: list[dict[str, Any]]) -> Any:
    return {
        ("faults", FAULT.name, 0): trial(by),
        ("others", FAULT.name, 0): ["PFX-3"],
        ("chance", FAULT.name, 0): drawn[:10],
        ("chance", FAULT.name, 10): drawn[10:],
        ("alarms", "reference", 0): {"examples": 1000, "found": alarms},
    }


ALL, HALF = [True] * 20, [True, False] * 10


def test_seeds_that_do_not_draw_a_fault_are_told() -> None:
    result = measured(["machine"], HALF, [])
    assert "at least 0.50 over 20 seeds" in page(result)
    assert failures(result) == [f"{FAULT.name} is missed"]


def test_what_scenarios_convict_every_run_convicts() -> None:
    result = measured(["scenarios", "machine"], HALF, [])
    assert "| core | 1.00 | 0.50 | 3 | scenarios, machine | PFX-3 |" in page(result)
    assert failures(result) == []


def test_a_fault_that_nobody_convicts_is_told() -> None:
    result = measured([], [False] * 20, [])
    assert "| 0 of 1 |" in page(result)
    assert failures(result) == [f"{FAULT.name} is missed"]


def test_a_requirement_that_is_blocked_is_told() -> None:
    result = {("others", "only-prompts-are-published", 0): ["PFX-8"]}
    hidden = "only-prompts-are-published is hidden by what its requirement needs"
    assert failures(result) == [hidden]


def test_false_alarms_are_told() -> None:
    alarm = {"spec_id": "SCH-1", "operations": 4, "message": "first come"}
    result = measured(["machine"], ALL, [alarm])
    assert "| reference: The engine of this package. | 1,000 | SCH-1 |" in page(result)
    assert failures(result) == ["reference is convicted: ['SCH-1']"]


def test_the_page_is_put_between_its_markers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for text in ("first", "second"):
        put(path, text)
        assert path.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\n{text}\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["nothing", f"{END}\n{BEGIN}", BEGIN])
def test_a_page_without_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="has no lines"):
        put(path, "anything")
    assert path.read_text(encoding="utf-8") == text
