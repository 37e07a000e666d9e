"""Memory of every rank's GPU that all ranks of a host write to, for `peer_all_reduce`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as _symmetric_memory
import torch.distributed.distributed_c10d as _c10d

from nanovllm.kernels.peer_all_reduce import PeerBuffers, num_programs

# Their stubs leave out most of what is used here.
distributed: Any = dist
c10d: Any = _c10d
symmetric_memory: Any = _symmetric_memory

CAPACITY = 2**18
"""Words of the longest vector, which then has 1 MiB; longer ones are NCCL's."""

NAME_KEY = "nanovllm/peers are called"

logger = logging.getLogger(__name__)


class PeerMemory:
    """This rank's part of it; every rank makes its own at the same time.

    Raises RuntimeError if the ranks' devices cannot reach each other.
    """

    def __init__(self, store: Any, backend: Any, device: torch.device) -> None:
        rank, size = backend.rank(), backend.size()
        # The sums do not use it, and it is not to be turned on in passing.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if rank == 0:
            store.set(NAME_KEY, uuid4().hex)
        name = store.get(NAME_KEY).decode()  # of this engine; a process may have several
        self._buffer = symmetric_memory.empty(
            2 * size * CAPACITY, dtype=torch.int64, device=device
        ).zero_()
        torch.cuda.synchronize(device)  # zeros, before anybody else can write
        with registered(name, distributed.PrefixStore(name, store), backend):
            self._handle = symmetric_memory.rendezvous(self._buffer, name)
        addresses = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=device)
        calls = torch.zeros(num_programs(CAPACITY), dtype=torch.int32, device=device)
        aborted = torch.zeros(1, dtype=torch.int32, device=device)
        self.buffers = PeerBuffers(rank, size, CAPACITY, addresses, calls, aborted)
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def abort(self) -> None:
        """End the waiting of sums that are under way."""
        with torch.cuda.stream(self._beside):
            self.buffers.aborted.copy_(self._one, non_blocking=True)


@contextmanager
def registered(name: str, store: Any, backend: Any) -> Iterator[None]:
    """In the block torch knows the ranks of NCCL's `backend` as a group of this name."""
    group = distributed.ProcessGroup(store, backend.rank(), backend.size())
    group._register_backend(torch.device("cuda"), group.BackendType.NCCL, backend)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    try:
        yield
    finally:
        c10d._unregister_process_group(name)


def meet_peers(store: Any, backend: Any, device: torch.device) -> PeerMemory | None:
    """None, with a warning, if the devices cannot reach each other: other hosts, no NVLink."""
    try:
        return PeerMemory(store, backend, device)
    except RuntimeError as error:
        logger.warning(
            "rank %d: sums go over NCCL, for want of peer access: %s", backend.rank(), error
        )
        return None
