"""How much of a GPU's memory the KV cache may have (MEM-1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SLACK_BYTES = 256 * 2**20
"""Left free for what no allocator of ours sees: libraries' workspaces, loaded kernels."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one device, as one engine sees them.

    Attributes:
        total: of the device.
        free: now, whoever holds the rest.
        weights: of this engine.
        peak: more that its largest legal step takes at its worst moment.
        graphs: more that its CUDA graphs keep.
    """

    total: int
    free: int
    weights: int
    peak: int
    graphs: int

    def kv_budget(self, utilization: float) -> int:
        """Bytes for the KV cache: within this engine's share, and within what is there.

        A share is of the device, so that two engines of 0.4 fit beside each other; what others
        hold counts only against what is free.
        """
        share = int(self.total * utilization) - self.weights - self.peak - self.graphs
        there = self.free - self.peak - self.graphs - SLACK_BYTES
        return min(share, there)

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {getattr(self, name) / 2**30:.2f}"
            for name in ("total", "free", "weights", "peak", "graphs")
        )
        return f"{parts} GiB"


class MemoryMeter:
    """Watches one device's allocator from its construction on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._origin = torch.cuda.memory_allocated(device)

    def allocated(self) -> int:
        """Bytes allocated since the start."""
        return torch.cuda.memory_allocated(self.device) - self._origin

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes that `work` takes at its worst moment, beyond what is there before."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) - before

    def kept_by(self, work: Callable[[], object]) -> int:
        """Bytes that the result of `work` keeps from everyone else while it lives."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        result = work()
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved(self.device) - before
        del result
        return kept

    def memory(self, weights: int, peak: int, graphs: int) -> GpuMemory:
        """These parts, beside what the device has now."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return GpuMemory(total, free, weights, peak, graphs)
