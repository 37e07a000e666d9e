"""Ranks launched one by one with the variables that `torchrun` sets; each in its own process."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tp_engines import PRELOADED

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Options = dict[str, object]


def answer(channel: Connection, checkpoint: str, environment: dict[str, str], options: Options):
    """The program of every rank: completes each prompt that comes, on rank 0."""
    os.environ.update(environment)
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def launched(
    checkpoint: str, size: int, port: int, **options: object
) -> Iterator[tuple[Connection, list[BaseProcess]]]:
    """A channel to rank 0, and all ranks; each believes to be alone on its host."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    processes = []
    for rank in range(size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        args = (theirs, str(checkpoint), environment, options)
        processes.append(context.Process(target=answer, args=args))
        processes[-1].start()
    try:
        yield ours, processes
    finally:
        for process in processes:
            process.kill()
            process.join()
