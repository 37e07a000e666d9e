"""Ctrl-C, at a moment when everything is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class _Hold:
    """Keeps the first signal for later, and passes on all others."""

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before = before
        self.first: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            self.before(number, frame)
        else:
            self.first = (number, frame)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C comes after the block, or the function that this decorates; a second one at once.

    Half of a change to the queues is none that a next call can go on from; and a step that some
    ranks have begun, all must finish. But a long prompt on a CPU can take a minute.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before) or isinstance(before, _Hold):
        yield
        return
    hold = _Hold(before)
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if hold.first is not None:
            before(*hold.first)
