"""Engines of several ranks for tests: fast to start, and looked at from outside."""

import atexit
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.tensor_parallel import start
from nanovllm.engine.tensor_parallel.ranks import Ranks

PRELOADED = [
    "nanovllm.engine.tensor_parallel.worker",
    "nanovllm.engine.tensor_parallel.start",
    "nanovllm.models.qwen3",
    "nanovllm.llm",
    "tp_faults",
    "tp_launch",
]


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Ranks fork from a process that has imported torch, instead of each importing it anew."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    patch.setattr(start, "START_METHOD", "forkserver")


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[None]:
    """See `fork_ranks`, for the session; that process is up."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        first.start()
        first.join()
        yield


def ranks_of(llm: LLM) -> Ranks:
    return llm.model_runner.ranks


def pids(llm: LLM) -> list[int]:
    """Of the processes of ranks 1 and up."""
    return [member.process.pid for member in ranks_of(llm)._members.values()]


def forgetful(channel: Connection, checkpoint: Path) -> None:
    """A program that closes nothing; it tells whether its ranks have ended when it has."""
    llm = LLM(checkpoint, tensor_parallel_size=2, num_kvcache_blocks=50)
    llm.generate([1], SamplingParams(max_tokens=2), use_tqdm=False)
    numbers = pids(llm)
    atexit._run_exitfuncs()  # of itself a forked process does not
    channel.send((hasattr(llm.model_runner, "model"), [*map(is_running, numbers)]))


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def listening_ports() -> set[int]:
    """TCP ports that this process listens at."""
    listening = "0A"
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except FileNotFoundError:  # the one that lists them
            continue
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    entries = [line.split() for table in tables for line in table]
    return {
        int(entry[1].rsplit(":", 1)[1], 16)
        for entry in entries
        if entry[3] == listening and f"socket:[{entry[9]}]" in sockets
    }


def wait_for_fault(llm: LLM, seconds: float = 10) -> str | None:
    """The cause for which the engine has to end, as soon as it is known."""
    ranks = ranks_of(llm)
    with ranks._news:
        ranks._news.wait_for(lambda: ranks.fault is not None, seconds)
    return ranks.fault


def wait_for_end(numbers: list[int], seconds: float = 10) -> bool:
    """Whether these processes end in time. Nobody tells when they are not our children."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, numbers)):
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True
