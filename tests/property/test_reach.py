"""What the state machine's examples reach: a machine that never preempts shows nothing of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_scheduler_machine import SchedulerMachine

SITUATIONS = (
    "preemption",
    "hit on a free block",
    "hit on a used block",
    "eviction",
    "chunk",
    "whole prompt resident",
    "samples share",
)


@pytest.mark.spec("SCH-6")
def test_examples_reach_every_situation() -> None:
    reached: Counter[str] = Counter()

    class Counting(SchedulerMachine):
        def teardown(self) -> None:
            super().teardown()
            reached.update((+self.door.book.events).keys() if hasattr(self, "door") else ())

    profile = settings(max_examples=100, derandomize=True, database=None, phases=[Phase.generate])
    run_state_machine_as_test(Counting, settings=profile)
    assert {name: reached[name] for name in SITUATIONS if reached[name] < 10} == {}, reached
