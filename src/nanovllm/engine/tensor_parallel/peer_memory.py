"""Memory of every rank's GPU that all ranks of a host write to, for sums of their own."""

from __future__ import annotations

import logging
import pickle
import socket
from contextlib import suppress
from pathlib import Path

import torch

from nanovllm.engine.tensor_parallel.device_memory import MappedMemory, SharedMemory
from nanovllm.engine.tensor_parallel.store import Store
from nanovllm.kernels.peer_all_reduce import PeerBuffers, num_programs

CAPACITY = 2**18
"""Words of the longest vector, which then has 1 MiB; longer ones are NCCL's."""

logger = logging.getLogger(__name__)


class PeerMemory:
    """This rank's part of it, and the others'; every rank makes its own at the same time.

    Raises RuntimeError if the ranks' devices cannot reach each other.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self._parts: dict[int, SharedMemory | MappedMemory] = {}
        try:
            part_bytes = 2 * size * CAPACITY * 8
            self._share(store, rank, 2 * part_bytes, device)
            for peer in set(range(size)) - {rank}:
                self._map(store, peer)
            addresses = [self._parts[peer].address for peer in range(size)]
            aborted = torch.zeros(1, dtype=torch.int32, device=device)
            self.for_sums, self.for_norms = (
                PeerBuffers(
                    rank,
                    size,
                    CAPACITY,
                    torch.tensor([address + offset for address in addresses], device=device),
                    torch.zeros(num_programs(CAPACITY), dtype=torch.int32, device=device),
                    aborted,
                )
                for offset in (0, part_bytes)
            )
            self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        except RuntimeError:
            self.free()
            raise

    def _share(self, store: Store, rank: int, num_bytes: int, device: torch.device) -> None:
        handle = b""  # tells the others not to wait
        try:
            torch.cuda.synchronize(device)  # makes its context this thread's
            self._parts[rank] = part = SharedMemory(num_bytes)
            torch.cuda.synchronize(device)  # zeros, before anybody else can write
            handle = part.handle
        finally:
            store.set(_key(rank), pickle.dumps((_host(), handle)))

    def _map(self, store: Store, peer: int) -> None:
        host, handle = pickle.loads(store.get(_key(peer)))
        if host != _host():
            raise RuntimeError(f"rank {peer} is on another host")
        if not handle:
            raise RuntimeError(f"rank {peer} has no memory to share")
        self._parts[peer] = MappedMemory(handle)

    def abort(self) -> None:
        """End the waiting of sums that are under way, if the device still works."""
        with suppress(RuntimeError), torch.cuda.stream(self._beside):
            self.for_sums.aborted.copy_(self._one, non_blocking=True)

    def free(self) -> None:
        """Give the memory back, when no sum is under way any more."""
        for part in self._parts.values():
            with suppress(RuntimeError):
                part.free()


def _host() -> str:
    """This boot of this host: containers have names of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _key(rank: int) -> str:
    return f"nanovllm/memory of rank {rank}"


def meet_peers(store: Store, rank: int, size: int, device: torch.device) -> PeerMemory | None:
    """None, with a warning, if the devices cannot reach each other."""
    try:
        return PeerMemory(store, rank, size, device)
    except RuntimeError as error:
        logger.warning("rank %d: sums go over NCCL, for want of peer access: %s", rank, error)
        return None
