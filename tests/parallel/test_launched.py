"""Ranks that `torchrun` starts, on one host or several."""

import json
import socket
from pathlib import Path

import pytest
from cli_door import POOL_ARGS
from tp_launch import GREEDY, answer, command, free_port, launched

from nanovllm import LLM

pytestmark = pytest.mark.usefixtures("forked_ranks")

LIMIT = 10.0
PROMPT = [5, 6, 7, 8]
OPTIONS = {"tensor_parallel_size": 2, "num_kvcache_blocks": 50}


@pytest.mark.spec("TP-1", "TP-4")
def test_two_groups_of_one_rank_are_one_engine(checkpoint: Path) -> None:
    with LLM(checkpoint) as llm:
        expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids
    with launched(2, free_port(), answer, checkpoint, OPTIONS) as (rank_0, rank_1):
        assert rank_0.channel.recv() == "ready"
        rank_0.channel.send(PROMPT)
        assert rank_0.channel.recv() == (expected, None)
        rank_0.channel.send(None)
        for rank in (rank_0, rank_1):
            rank.process.join(LIMIT)
            assert rank.process.exitcode == 0


@pytest.mark.spec("TP-4")
def test_a_rank_elsewhere_is_killed(checkpoint: Path) -> None:
    """The others wait for it, and for each other; none of them is a child of rank 0."""
    options = OPTIONS | {"tensor_parallel_size": 4}
    with launched(4, free_port(), answer, checkpoint, options) as (rank_0, *others):
        assert rank_0.channel.recv() == "ready"
        others[1].process.kill()
        rank_0.channel.send(PROMPT)
        assert rank_0.channel.poll(LIMIT)
        assert rank_0.channel.recv() == ([], "rank 2 is gone: its connection has closed")
        for rank in others:
            rank.process.join(LIMIT)
            assert rank.process.exitcode not in (None, 0)


@pytest.mark.spec("TP-4")
def test_rank_0_is_killed(checkpoint: Path) -> None:
    with launched(2, free_port(), answer, checkpoint, OPTIONS) as (rank_0, rank_1):
        assert rank_0.channel.recv() == "ready"
        rank_0.process.kill()
        rank_1.process.join(LIMIT)
        assert rank_1.process.exitcode not in (None, 0)


@pytest.mark.spec("TP-4")
def test_a_taken_port_is_told(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launched(2, port, answer, checkpoint, OPTIONS) as (rank_0, _):
            assert rank_0.channel.poll(LIMIT)
            assert str(port) in rank_0.channel.recv()


@pytest.mark.spec("TP-3c")
def test_another_number_of_ranks_than_the_engine_wants(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=3 .* tensor_parallel_size=2"):
        LLM(checkpoint, **OPTIONS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="RANK is not set"):
        LLM(checkpoint, **OPTIONS)


@pytest.mark.spec("TP-1")
def test_a_job_of_the_command_line_is_written_once(checkpoint: Path, tmp_path: Path) -> None:
    """All ranks are started alike; only rank 0 opens the files."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "hello", "temperature": 0, "max_tokens": 5}\n' * 2)
    arguments = ["generate", "--json", "--model", str(checkpoint), *POOL_ARGS]
    arguments += ["-i", str(source), "-o", str(target), "--tensor-parallel-size", "2"]
    with launched(2, free_port(), command, *arguments) as (rank_0, rank_1):
        exit_code, printed = rank_0.channel.recv()
        assert (exit_code, json.loads(printed)["num_lines"]) == (0, 2)
        assert rank_1.channel.recv() == (0, "")
    assert len(target.read_text().splitlines()) == 2
