"""Brings the ranks of an engine up: as processes on this host, or as `torchrun` launched them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.runners import build_runner, resolve_device
from nanovllm.engine.tensor_parallel.channel import Listener, connect
from nanovllm.engine.tensor_parallel.group import make_group
from nanovllm.engine.tensor_parallel.leading import Leading, LeadingRunner
from nanovllm.engine.tensor_parallel.ranks import Member, Ranks
from nanovllm.engine.tensor_parallel.store import (
    LAUNCH_TIMEOUT,
    Store,
    launched_store,
    new_store,
)
from nanovllm.engine.tensor_parallel.worker import BuildRunner, Post, serve, spawned
from nanovllm.layers.backends import select_backend
from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig

START_METHOD: Final = "spawn"

ADDRESS_KEY = "nanovllm/rank 0 listens at"


@dataclass(frozen=True, slots=True)
class Launch:
    """What `torchrun` says, or whoever sets its variables."""

    rank: int
    local_rank: int

    @classmethod
    def from_environment(cls, size: int) -> Launch | None:
        """None unless this process is one of several ranks.

        Raises ValueError if these are not `size`, or it is not said which one this is.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return None
        if world != size:
            raise ValueError(f"WORLD_SIZE={world} ranks were launched, tensor_parallel_size={size}")
        if "RANK" not in os.environ:
            raise ValueError(f"WORLD_SIZE={world}, but RANK is not set: which of them is this?")
        rank = int(os.environ["RANK"])
        return cls(rank, int(os.environ.get("LOCAL_RANK", str(rank))))


def start_ranks(config: Config, model_config: ModelConfig) -> ModelRunner:
    """The runner of rank 0, which leads; on another rank that was launched, serve, then exit.

    Raises ValueError for what cannot be had or split, RankError if another rank fails, and
    SystemExit on another rank.
    """
    size = config.tensor_parallel_size
    launch = Launch.from_environment(size)
    build = partial(build_runner, config, model_config)
    if launch is None:
        check_devices(config.device, size)
        store, port = new_store()
        ranks = spawn(size, config.device, port, build)
    else:
        store = launched_store()
        if launch.rank > 0:
            post = Post(launch.rank, size, rank_device(config.device, launch.local_rank), build)
            serve_launched(post, store)
            raise SystemExit(0)
        ranks = admit(size, store)
    return lead(ranks, store, config, model_config)


def lead(ranks: Ranks, store: Store, config: Config, model_config: ModelConfig) -> ModelRunner:
    """Build rank 0's runner while the others build theirs."""
    size, device = config.tensor_parallel_size, rank_device(config.device, 0)
    try:
        ranks.wait_joined()
        with refusals_first(ranks):
            group = make_group(store, 0, size, device)
            ranks.group = group  # from here on a lost rank breaks what rank 0 waits in
            group.meet_peers(store, device)
            backend = select_backend(config.attention_backend, device)
            runner = leading_class(backend.captures)(
                ranks, config, model_config, backend, device, TensorParallel(0, size, group)
            )
        ranks.wait_ready()
    except BaseException:
        ranks.close()
        raise
    return runner


@contextmanager
def refusals_first(ranks: Ranks) -> Iterator[None]:
    """What rank 0 finds wrong by itself is raised as it is: all ranks find it."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError):
        raise
    except Exception:
        with ranks.guarded():
            raise


def leading_class(captures: bool) -> type[Leading]:
    """`captures`: whether the backend's decode steps can be captured."""
    if not captures:
        return LeadingRunner
    from nanovllm.engine.tensor_parallel.cuda_leading import LeadingCudaRunner

    return LeadingCudaRunner


# ---- on this host ------------------------------------------------------------------------------


def rank_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank, which is the `local_rank`-th on its host."""
    device = resolve_device(name)
    return torch.device("cuda", local_rank) if device.type == "cuda" else device


def check_devices(name: str, size: int) -> None:
    """Raises ValueError if there are too few GPUs."""
    found = torch.cuda.device_count()
    if resolve_device(name).type == "cuda" and found < size:
        raise ValueError(f"tensor_parallel_size={size}, but torch finds {found} CUDA devices here")


def spawn(size: int, device: str, store_port: int, build: BuildRunner) -> Ranks:
    """Start ranks 1..size-1 as processes of this host."""
    context = multiprocessing.get_context(START_METHOD)
    num_threads = max(1, torch.get_num_threads() // size)
    members = []
    for rank in range(1, size):
        ours, theirs = context.Pipe()
        post = Post(rank, size, rank_device(device, rank), build)
        process = context.Process(
            target=spawned,
            args=(post, theirs, store_port, num_threads),
            name=f"nanovllm-rank-{rank}",
            daemon=True,  # ends with this process even if nobody closes the engine
        )
        with interrupts_blocked():
            process.start()
        theirs.close()
        members.append(Member(rank, ours, process))
    return Ranks(members)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A process that starts in the block never sees Ctrl-C, not even while it imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- launched, maybe on several hosts ----------------------------------------------------------


def admit(size: int, store: Store) -> Ranks:
    """Wait for ranks 1..size-1 to connect."""
    with Listener(os.environ["MASTER_ADDR"], LAUNCH_TIMEOUT.total_seconds()) as listener:
        store.set(ADDRESS_KEY, pickle.dumps(listener.address))
        channels = dict(listener.accept(size - 1))
    return Ranks([Member(rank, channels[rank], None) for rank in range(1, size)])


def serve_launched(post: Post, store: Store) -> None:
    """Connect to rank 0, and do what it says."""
    channel = connect(pickle.loads(store.get(ADDRESS_KEY)), post.rank)
    serve(post, channel, lambda: store)
