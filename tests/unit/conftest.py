"""Checkpoints shared by the unit tests; read-only."""

from pathlib import Path

import pytest
from replicas import several, single  # noqa: F401
from tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level tokenizer, ids 0..255 the bytes, 256 the eos."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer=True)
