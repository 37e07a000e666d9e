"""Ranks on the command line."""

import json
from pathlib import Path

import pytest
from cli_door import GREEDY_ARGS, POOL_ARGS, invoke

pytestmark = pytest.mark.usefixtures("forked_ranks")

RANKS = ["--tensor-parallel-size", "2"]


@pytest.mark.spec("TP-1")
def test_generate_prints_the_same(checkpoint: Path) -> None:
    command = ["generate", "hello", *GREEDY_ARGS, "--model", str(checkpoint), *POOL_ARGS]
    alone, shared = invoke(*command), invoke(*command, *RANKS)
    assert (shared.exit_code, shared.stdout) == (0, alone.stdout)


@pytest.mark.spec("TP-2")
def test_info_shows_the_ranks(checkpoint: Path) -> None:
    command = ["info", "--json", "--model", str(checkpoint), *POOL_ARGS]
    alone, shared = (json.loads(invoke(*command, *more).stdout) for more in ([], RANKS))
    assert alone["model"] == shared["model"]
    (whole,) = alone["ranks"].values()
    part = whole | {"kv_bytes": whole["kv_bytes"] // 2}
    assert shared["ranks"] == {"rank 0": part, "rank 1": part}
