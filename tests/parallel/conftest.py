"""Ranks as processes, over gloo."""

import pytest
from tiny_models import make_checkpoint
from tp_engines import forked_ranks  # noqa: F401


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Odd vocabulary, 8 heads, 2 KV heads; byte-level tokenizer."""
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        seed=3,
        tokenizer=True,
        num_attention_heads=8,
        vocab_size=301,
    )
