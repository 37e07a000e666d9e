"""A rank that is lost ends the engine with the cause, soon, and leaves nothing behind (TP-4)."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from tp_engines import (
    forgetful,
    is_running,
    listening_ports,
    pids,
    ranks_of,
    wait_for_end,
    wait_for_fault,
)
from tp_faults import Fault, build_faulty

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.tensor_parallel import group, start
from nanovllm.engine.tensor_parallel.ranks import RankError
from nanovllm.engine.tensor_parallel.store import new_store

pytestmark = [pytest.mark.usefixtures("forked_ranks"), pytest.mark.spec("TP-4")]

LIMIT = 10.0  # seconds, of TP-4
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5], [6]]
OPTIONS = {"num_kvcache_blocks": 50, "max_num_seqs": 2}

CAUSES = {
    False: "rank {}: ArithmeticError: planted in rank {}",
    True: "rank {} was killed by SIGKILL",
}


@pytest.fixture
def within_limit(request: pytest.FixtureRequest, figures):
    """Times a block, which has to be over within the limit of TP-4."""

    @contextmanager
    def timed() -> Iterator[None]:
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        row = {"fault": request.node.name, "seconds": seconds}
        figures.setdefault("from a fault to its end", []).append(row)
        assert seconds < LIMIT

    return timed


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def assert_a_new_engine_starts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:
        assert [o.finish_reason for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == [
            "length"
        ] * len(PROMPTS)


def assert_it_refuses_everything(llm: LLM, cause: str) -> None:
    calls = (
        lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False),
        lambda: llm.add_request([1], GREEDY),
        lambda: llm.stream([1], GREEDY),
        llm.step,
        llm.stats,
        llm.is_finished,
        llm.reset_prefix_cache,
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=f"this engine has failed: {cause}"):
            call()


@pytest.mark.parametrize("kill", [False, True], ids=["raises", "is killed"])
@pytest.mark.parametrize("call", [1, 4], ids=["in prefill", "in decode"])
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (4, 2)])
def test_a_rank_is_lost_in_a_step(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    within_limit,
    size: int,
    rank: int,
    call: int,
    kill: bool,
) -> None:
    before = shared_memory()
    fault = Fault(rank, call, kill)
    monkeypatch.setattr(start, "build_runner", partial(build_faulty, fault))
    cause = CAUSES[kill].format(rank, rank)
    with LLM(checkpoint, tensor_parallel_size=size, **OPTIONS) as llm:
        numbers = pids(llm)
        with within_limit():
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [(o.finish_reason, o.samples[0].error) for o in outputs] == [("error", cause)] * 3
        assert [len(o.token_ids) for o in outputs] == [call - 1, call - 1, 0]
        assert_it_refuses_everything(llm, cause)
        assert wait_for_end(numbers)
    assert shared_memory() == before
    assert_a_new_engine_starts(checkpoint, monkeypatch)


def test_steps_hand_over_what_a_lost_rank_ended(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "build_runner", partial(build_faulty, Fault(1, 2, True)))
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:
        mine = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        llm.generate([7], GREEDY, use_tqdm=False)
        outputs = llm.step().outputs
        assert [(o.request_id, o.finish_reason) for o in outputs] == [(i, "error") for i in mine]
        assert_it_refuses_everything(llm, CAUSES[True].format(1, 1))


def test_a_rank_is_killed_while_idle(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, within_limit
) -> None:
    with LLM(checkpoint, tensor_parallel_size=4, **OPTIONS) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        numbers = pids(llm)
        with within_limit():
            os.kill(numbers[1], signal.SIGKILL)
            assert wait_for_fault(llm, LIMIT) == "rank 2 was killed by SIGKILL"
        assert_it_refuses_everything(llm, "rank 2 was killed by SIGKILL")
        assert wait_for_end(numbers)
    assert_a_new_engine_starts(checkpoint, monkeypatch)


def test_a_rank_is_killed_between_two_steps(checkpoint: Path, within_limit) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:
        requests = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        llm.step()
        with within_limit():
            os.kill(pids(llm)[0], signal.SIGKILL)
            outputs = {o.request_id: o for o in llm.step().outputs}
        assert {outputs[i].finish_reason for i in requests} == {"error"}
        assert_it_refuses_everything(llm, "rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("kill", [False, True], ids=["raises", "is killed"])
def test_a_rank_is_lost_while_it_starts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, within_limit, kill: bool
) -> None:
    monkeypatch.setattr(start, "build_runner", partial(build_faulty, Fault(2, 0, kill)))
    with within_limit(), pytest.raises(RankError, match=CAUSES[kill].format(2, 2)):
        LLM(checkpoint, tensor_parallel_size=4, **OPTIONS)
    assert_a_new_engine_starts(checkpoint, monkeypatch)


def test_a_rank_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost between its word that it comes and the meeting: nothing could break this wait."""
    assert group.MEETING_TIMEOUT.total_seconds() < LIMIT
    monkeypatch.setattr(group, "MEETING_TIMEOUT", timedelta(seconds=0.1))
    store, _ = new_store()
    with pytest.raises(RuntimeError):
        group.make_group(store, 0, 2, torch.device("cpu"))


def test_what_rank_0_raises_in_a_step_is_fatal_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its part, and nothing can call them back."""
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:

        def broken(*args):
            raise ArithmeticError("planted")

        monkeypatch.setattr(llm.model_runner.model, "forward", broken)
        (output,) = llm.generate([1], GREEDY, use_tqdm=False)
        assert output.samples[0].error == "rank 0: ArithmeticError: planted"
        assert_it_refuses_everything(llm, "rank 0: ArithmeticError: planted")
        assert wait_for_end(pids(llm))


def test_what_rank_0_raises_beside_a_step_is_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:
        expected = [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner, "sampler", None)
            (output,) = llm.generate([1], GREEDY, use_tqdm=False)
        assert output.finish_reason == "error"
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected


def test_an_interrupt_waits_for_the_end_of_the_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:
        expected = [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        real = llm.model_runner.model.forward

        def interrupted(*args):
            os.kill(os.getpid(), signal.SIGINT)
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner.model, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected


# ---- seen from outside -------------------------------------------------------------------------


@pytest.fixture
def program(checkpoint: Path):
    """`tp_program` in a process group of its own, in the middle of its steps; and its ranks."""
    command = [sys.executable, Path(__file__).parents[1] / "tp_program.py", checkpoint]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:
        ranks = [int(number) for number in process.stdout.readline().split()]
        assert process.stdout.readline().startswith("[")
        yield process, ranks
        process.kill()


def test_ctrl_c_for_all_ends_the_call_and_the_death_of_the_parent_ends_all(
    program, within_limit
) -> None:
    process, ranks = program
    os.killpg(process.pid, signal.SIGINT)
    assert "interrupted, length\n" in iter(process.stdout.readline, "")
    assert process.stdout.readline().startswith("[")
    assert all(map(is_running, ranks))
    with within_limit():
        process.kill()
        assert wait_for_end(ranks, LIMIT)


def test_the_end_of_a_program_closes_what_it_left_open(checkpoint: Path) -> None:
    """The runner first, then the ranks."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=forgetful, args=(theirs, checkpoint))
    process.start()
    theirs.close()
    assert ours.recv() == (False, [False])
    process.join(LIMIT)
    assert process.exitcode == 0


def test_a_taken_port_disturbs_nobody(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system chooses ports that are free; those of the environment are for launched ranks."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        assert_a_new_engine_starts(checkpoint, monkeypatch)


def test_a_device_that_fails_at_the_end_leaves_no_rank(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint, tensor_parallel_size=2, **OPTIONS)
    numbers = pids(llm)

    def fails(runner: ModelRunner) -> None:
        raise RuntimeError("planted: the device has failed")

    monkeypatch.setattr(ModelRunner, "close", fails)
    with pytest.raises(RuntimeError, match="planted"):
        llm.close()
    assert wait_for_end(numbers, seconds=0)


def test_a_closed_engine_leaves_no_port(checkpoint: Path) -> None:
    before = listening_ports()
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:
        assert listening_ports() > before
        assert ranks_of(llm).fault is None
    del llm
    assert listening_ports() == before
