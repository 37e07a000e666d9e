"""CUDA graphs of whole decode steps: from seats to sampled tokens, one graph per batch size (GRF).

A graph replays kernels with the addresses and launch shapes they were recorded with. A decode step
fits: one token a row, and the kernels read the lengths from device memory. A prompt does not: its
number of tokens is a launch shape.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Body = Callable[[int], torch.Tensor]
"""Launches the decode step of the first `b` rows of the static inputs; returns logits [b, V]."""


def graph_batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then by 8 to 64, by 16 above, and always the exact maximum (GRF-1)."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_batch, 16)]
    return [size for size in sizes if size < max_batch] + [max_batch]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph, and its static output: logits [batch, vocab_size], of which it has the address."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class Address:
    """Where bytes are, and not a reason for them to stay there."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which its allocator may give to others when `tensor` is gone."""
    memory = torch.as_tensor(Address(tensor.untyped_storage()), device=tensor.device)
    values = memory.view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class DecodeGraphs:
    """Records `body` for each of `batch_sizes`, largest first, in one pool of memory.

    Nothing that a recording allocates outlives it, so that all use the memory that the largest one
    needs; logits, too: 39 sizes up to 512 of a vocabulary of 150,000 would be 2.4 GB.

    The caller sees to it that the static inputs hold padding only, so that warming up and recording
    leave no trace (GRF-5).
    """

    def __init__(self, body: Body, batch_sizes: Sequence[int]) -> None:
        started = time.perf_counter()
        self._recorded: dict[int, Recorded] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(batch_sizes, reverse=True):
            body(size)  # compiles kernels and makes workspaces, which a recording must not
            graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile, such as the watchdog of a process group.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = body(size)
            self._recorded[size] = Recorded(graph, unowned(logits))
            del logits
        torch.cuda.synchronize()
        self.sizes = sorted(self._recorded)
        self.seconds = time.perf_counter() - started

    def size_for(self, num_rows: int) -> int | None:
        """The smallest recorded batch that holds `num_rows`; None beyond the largest (GRF-4)."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def replay(self, size: int) -> torch.Tensor:
        """Launch the graph of `size` rows; its logits, valid until the next replay."""
        recorded = self._recorded[size]
        recorded.graph.replay()
        return recorded.logits
