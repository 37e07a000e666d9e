"""The group that ranks communicate over: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nanovllm.engine.tensor_parallel.peer_memory import PeerMemory, meet_peers
from nanovllm.kernels.peer_all_reduce import peer_all_reduce
from nanovllm.layers.parallel import TensorParallel

torch_distributed: Any = dist  # its stubs leave out most of what is used here

LOCAL_HOST = "127.0.0.1"

STORE_TIMEOUT = timedelta(seconds=8)
"""For what the others tell in the store: they run already when a group is made."""

MEETING_TIMEOUT = timedelta(seconds=8)
"""For the others to be where rank 0 is, when they all have told that they come."""

LAUNCH_TIMEOUT = timedelta(minutes=5)
"""For all ranks that are launched to meet."""

ABORT_TIMEOUT = 2.0
"""Seconds; nobody waits longer for the end of an abort."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Ranks may load weights for that long. It is not how a lost rank is noticed, see `ranks`."""


class Store(Protocol):
    """A key-value store of torch, over which ranks meet."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...


class RankGroup:
    """A group of torch that can be broken, and given up while layers still refer to it.

    A backend by itself, not registered as the one default group of the process. With `peers`, it
    leaves short sums to `peer_all_reduce`.
    """

    def __init__(self, backend: Any, peers: PeerMemory | None = None) -> None:
        self._backend = backend
        self._peers = peers

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None:
        if self._peers is not None and opts.reduceOp == dist.ReduceOp.SUM:
            (x,) = tensors
            if self._peers.buffers.takes(x):
                peer_all_reduce(x, self._peers.buffers)
                return None
        work: dist.Work | None = self._backend.allreduce(tensors, opts)
        return work

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None:
        work: dist.Work | None = self._backend.broadcast(tensors, opts)
        return work

    def _allgather_base(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> dist.Work | None:
        work: dist.Work | None = self._backend._allgather_base(output, x, opts)
        return work

    def abort(self) -> threading.Thread:
        """Break what is under way, for which another thread may be waiting.

        In a thread, since NCCL (2.26 and later) waits until no CUDA graph refers to the group.
        """
        if self._peers is not None:
            self._peers.abort()
        thread = threading.Thread(target=self._backend.abort, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Free its ports and memory."""
        self.abort().join(ABORT_TIMEOUT)
        self._backend = self._peers = None


def new_store() -> tuple[Store, int]:
    """A store in this process, and its port, which the system chooses."""
    store = torch_distributed.TCPStore(
        LOCAL_HOST, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT
    )
    return store, store.port


def store_at(port: int) -> Store:
    """The store that another process of this host has."""
    store: Store = torch_distributed.TCPStore(LOCAL_HOST, port, timeout=STORE_TIMEOUT)
    return store


def launched_store() -> Store:
    """The store of all ranks that were launched together (`env://`); waits for them."""
    store: Store = next(torch_distributed.rendezvous("env://", timeout=LAUNCH_TIMEOUT))[0]
    return store


def make_group(store: Store, rank: int, size: int, device: torch.device) -> RankGroup:
    """The group of `size` ranks that meet in `store`; every rank has to call it, rank 0 last."""
    if device.type == "cpu":
        # Nothing breaks this wait if a rank is lost now. The others end with rank 0.
        timeout = COLLECTIVE_TIMEOUT if rank else MEETING_TIMEOUT
        gloo = torch_distributed.ProcessGroupGloo(store, rank, size, timeout)
        gloo._set_default_timeout(COLLECTIVE_TIMEOUT)
        return RankGroup(gloo)
    torch.cuda.set_device(device)  # where NCCL and Triton launch
    # A lost peer, or a device that fails, must not take the process down: on rank 0 it is the
    # user's, and another rank reports the cause before it ends.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    options = torch_distributed.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    nccl = torch_distributed.ProcessGroupNCCL(store, rank, size, options)
    peers = meet_peers(store, nccl, device)
    group = RankGroup(nccl)
    all_have = TensorParallel(rank, size, group).minimum(int(peers is not None), device)
    return RankGroup(nccl, peers) if all_have else group
