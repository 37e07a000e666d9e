"""Ranks that `torchrun` starts, on one host or several."""

import socket

import pytest
from tp_launch import GREEDY, free_port, launched

from nanovllm import LLM
from nanovllm.engine.tensor_parallel.worker import ORPHANED

LIMIT = 10.0
PROMPT = [5, 6, 7, 8]
OPTIONS = {"tensor_parallel_size": 2, "num_kvcache_blocks": 50}


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[int]:
    with LLM(checkpoint) as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids


@pytest.mark.spec("TP-1", "TP-4")
def test_two_groups_of_one_rank_are_one_engine(checkpoint, expected) -> None:
    with launched(checkpoint, 2, free_port(), **OPTIONS) as (rank_0, processes):
        assert rank_0.recv() == "ready"
        rank_0.send(PROMPT)
        assert rank_0.recv() == (expected, None)
        rank_0.send(None)
        for process in processes:
            process.join(LIMIT)
        assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.spec("TP-4")
def test_a_rank_elsewhere_is_killed(checkpoint) -> None:
    with launched(checkpoint, 2, free_port(), **OPTIONS) as (rank_0, processes):
        assert rank_0.recv() == "ready"
        processes[1].kill()
        rank_0.send(PROMPT)
        assert rank_0.poll(LIMIT)
        assert rank_0.recv() == ([], "rank 1 is gone: its connection has closed")


@pytest.mark.spec("TP-4")
def test_rank_0_is_killed(checkpoint) -> None:
    with launched(checkpoint, 2, free_port(), **OPTIONS) as (rank_0, processes):
        assert rank_0.recv() == "ready"
        processes[0].kill()
        processes[1].join(LIMIT)
        assert processes[1].exitcode == ORPHANED


@pytest.mark.spec("TP-4")
def test_a_taken_port_is_told(checkpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launched(checkpoint, 2, port, **OPTIONS) as (rank_0, _):
            assert rank_0.poll(LIMIT)
            assert str(port) in rank_0.recv()


@pytest.mark.spec("TP-3c")
def test_another_number_of_ranks_than_the_engine_wants(checkpoint, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE=3 .* tensor_parallel_size=2"):
        LLM(checkpoint, **OPTIONS)
