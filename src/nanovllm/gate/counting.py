"""Counts what Python code does, for tests whose numbers are gated exactly."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


@contextmanager
def calls_into(package: ModuleType) -> Iterator[Counter[str]]:
    """Calls of named functions of a package while the block runs, by qualified name.

    The same on every version of Python: what is inlined in some (comprehensions) or is somebody
    else's (libraries, generated methods) is not counted. A generator counts each time it goes on.
    """
    home = str(Path(package.__path__[0])) + "/"
    counter: Counter[str] = Counter()

    def heard(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and code.co_filename.startswith(home):
            counter[code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(heard)
    try:
        yield counter
    finally:
        sys.setprofile(before)
