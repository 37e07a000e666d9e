"""A test carries the marker of its folder, and Ctrl-C arrives; the suite's plugin does the rest."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ("nanovllm.conformance.plugin", "figures", "gpu_host", "pytester")

# Tiny tensors gain nothing from threads, and on a busy machine threads that wait for each other
# cost minutes. Torch reads this when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

# Without a GPU kernels run in Triton's interpreter. Triton looks at this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SUITES = ("unit", "property", "gpu", "perf", "equality", "parallel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent / "tests"
    for item in items:
        if item.path.is_relative_to(tests):
            suite = item.path.relative_to(tests).parts[0]
            if suite in SUITES:
                item.add_marker(suite)


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """A shell starts background jobs with Ctrl-C ignored, and children inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
