"""The group that ranks communicate over: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.engine.tensor_parallel.peer_memory import PeerMemory, meet_peers
from nanovllm.engine.tensor_parallel.store import Store, torch_distributed
from nanovllm.kernels.peer_add_rms_norm import peer_add_rms_norm, takes_rows
from nanovllm.kernels.peer_all_reduce import peer_all_reduce
from nanovllm.layers.parallel import TensorParallel

MEETING_TIMEOUT = timedelta(seconds=8)
"""For the others to be where rank 0 is, when they all have told that they come."""

ABORT_TIMEOUT = 2.0
"""Seconds; nobody waits longer for the end of an abort."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Ranks may load weights for that long. It is not how a lost rank is noticed, see `ranks`."""


class RankGroup:
    """A group of torch that can be broken, and given up while layers still refer to it.

    A backend by itself, not registered as the one default group of the process. When it has met
    its `peers`, it leaves short sums to kernels that use their memory.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.peers: PeerMemory | None = None

    def meet_peers(self, store: Store, device: torch.device) -> None:
        """Use the memory of all ranks, if each of them reaches all others; every rank calls it.

        On CPUs there is nothing to use.
        """
        if device.type == "cpu":
            return
        rank, size = self._backend.rank(), self._backend.size()
        peers = meet_peers(store, rank, size, device)
        met = TensorParallel(rank, size, self).minimum(int(peers is not None), device)
        if met:
            self.peers = peers
        elif peers is not None:
            peers.free()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work | None:
        if self.peers is not None and opts.reduceOp == dist.ReduceOp.SUM:
            (x,) = tensors
            if self.peers.for_sums.takes(x):
                peer_all_reduce(x, self.peers.for_sums)
                return None
        work: dist.Work | None = self._backend.allreduce(tensors, opts)
        return work

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.peers is None or not takes_rows(x, self.peers.for_norms):
            return None
        return peer_add_rms_norm(x, residual, weight, eps, self.peers.for_norms)

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
        if self.peers is not None:
            self.peers.abort()
        thread = threading.Thread(target=self._backend.abort, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Free its ports and memory."""
        self.abort().join(ABORT_TIMEOUT)
        if self.peers is not None:
            self.peers.free()
        self._backend = self.peers = None


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
    return RankGroup(torch_distributed.ProcessGroupNCCL(store, rank, size, options))
