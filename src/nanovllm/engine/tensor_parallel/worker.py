"""A rank other than 0: it does what it is told, until it is told to end or rank 0 has ended."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.tensor_parallel.channel import receive, send_all, wait_for_end
from nanovllm.engine.tensor_parallel.group import make_group
from nanovllm.engine.tensor_parallel.ranks import Failure, Joined
from nanovllm.engine.tensor_parallel.store import Store, store_at
from nanovllm.layers.parallel import TensorParallel

ORPHANED = 3
"""Exit code of a rank whose rank 0 has ended without a word."""

DEVICE_CHECK_SECONDS = 0.5

BuildRunner = Callable[[torch.device, TensorParallel], ModelRunner]


@dataclass(frozen=True, slots=True)
class Post:
    """Which rank to be, where, and how to make its runner."""

    rank: int
    size: int
    device: torch.device
    build: BuildRunner


def spawned(post: Post, channel: Connection, store_port: int, num_threads: int) -> None:
    """The main function of a process that rank 0 has spawned."""
    torch.set_num_threads(num_threads)
    serve(post, channel, lambda: store_at(store_port))


def serve(post: Post, channel: Connection, open_store: Callable[[], Store]) -> None:
    """Join the group, and call what rank 0 says. Raises SystemExit if that fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C ends
    _start(_end_with, channel)
    try:
        send_all([channel], Joined())
        store = open_store()
        group = make_group(store, post.rank, post.size, post.device)
        group.meet_peers(store, post.device)
        runner = post.build(post.device, TensorParallel(post.rank, post.size, group))
        send_all([channel], runner.rank_info)
        if post.device.type == "cuda":
            _start(_watch_device, channel, post.device)
        while (call := receive(channel)) is not None:
            method, args = call
            getattr(runner, method)(*args)
        runner.close()
        group.close()
    except EOFError:
        os._exit(ORPHANED)
    except Exception as error:
        _report(channel, error)
        raise SystemExit(1) from error


def _report(channel: Connection, error: Exception) -> None:
    try:
        cause = f"{type(error).__name__}: {error}"
        send_all([channel], Failure(cause, "".join(traceback.format_exception(error))))
    except OSError:
        os._exit(ORPHANED)


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _end_with(channel: Connection) -> None:
    """End when rank 0 does, whatever this rank waits for at that moment."""
    wait_for_end(channel)
    os._exit(ORPHANED)


def _watch_device(channel: Connection, device: torch.device) -> None:
    """Report a device that fails while nobody asks it; rank 0 waits for its part of a sum."""
    stream, never = torch.cuda.current_stream(device), threading.Event()
    while not never.wait(DEVICE_CHECK_SECONDS):
        try:
            stream.query()
        except RuntimeError as error:
            _report(channel, error)
            os._exit(1)
