"""Ranks launched one by one with the variables that `torchrun` sets; each in its own process."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from cli_door import invoke
from tp_engines import PRELOADED

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclass(frozen=True)
class Launched:
    """A rank: its process, and a channel to the program that it runs."""

    process: BaseProcess
    channel: Connection


def answer(channel: Connection, checkpoint: str, options: dict[str, object]) -> None:
    """A program: tells whether the engine came up, then completes each prompt that comes."""
    try:
        llm = LLM(checkpoint, **options)
    except Exception as error:
        channel.send(f"{type(error).__name__}: {error}")
        return
    with llm:
        channel.send("ready")
        while (prompt := channel.recv()) is not None:
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            channel.send((output.token_ids, output.samples[0].error))


def command(channel: Connection, *arguments: str) -> None:
    """A program: the command line; tells its exit code and what it printed."""
    result = invoke(*arguments)
    channel.send((result.exit_code, result.stdout))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def launched(
    size: int, port: int, program: Callable[..., None], *args: object
) -> Iterator[list[Launched]]:
    """All ranks, running `program(channel, *args)`; each believes to be alone on its host."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(rank, size, port, program, theirs, *args))
        process.start()
        theirs.close()  # so that the end of the process is the end of the channel
        ranks.append(Launched(process, ours))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def _run(
    rank: int,
    size: int,
    port: int,
    program: Callable[..., None],
    channel: Connection,
    *args: object,
) -> None:
    os.environ["RANK"], os.environ["LOCAL_RANK"] = str(rank), "0"
    os.environ["WORLD_SIZE"] = str(size)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    program(channel, *args)
