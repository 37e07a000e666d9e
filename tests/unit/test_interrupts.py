"""Interrupts are held to the end of a block; real ones: `test_interrupted_calls.py`."""

import signal
from contextlib import ExitStack

import pytest

from nanovllm.engine.interrupts import interrupts_held


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_the_first_waits_for_the_end_and_others_do_not(depth: int, times: int) -> None:
    """And whoever counts them, as `nanovllm chat` does, gets all."""
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("interrupt"))
    try:
        with ExitStack() as blocks:
            for _ in range(depth):
                blocks.enter_context(interrupts_held())
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            seen.append("end")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["interrupt"] * (times - 1) + ["end", "interrupt"]
