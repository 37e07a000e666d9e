"""Checkpoints shared by the unit tests; read-only."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from replicas import several, single  # noqa: F401
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level tokenizer, ids 0..255 the bytes, 256 the eos."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """A shell starts background jobs with Ctrl-C ignored, and children inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
