"""Buffers between host and device that are made once: a step's way in, and its tokens' way out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from nanovllm.engine.decode_state import PADDING, Int32


def _events(buffers: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.cuda.Event]]:
    """The buffers in turn, each with the event that says when it is done with."""
    return cycle((buffer, timed_event()) for buffer in buffers)


def timed_event() -> torch.cuda.Event:
    """An event that tells when the device reached it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DecodeInputs:
    """The static inputs of decode steps, and the pinned rows that they are staged in.

    Attributes:
        seats, context_lens: int32 [max_rows]; padding rows have seat -1 and length 0.
        input_ids, positions, slot_mapping: int64 [max_rows], derived from these on the device.
        tokens: int64 [max_rows], what was sampled; -1 where nothing could be.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._staged = torch.tensor([[PADDING], [0]], dtype=torch.int32, device=device).repeat(
            1, max_rows
        )
        self.seats, self.context_lens = self._staged
        self.input_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.slot_mapping = torch.zeros_like(self.input_ids)
        self.tokens = torch.zeros_like(self.input_ids)
        self.cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._pinned = _events(
            torch.empty(2, max_rows, dtype=torch.int32, pin_memory=True) for _ in range(2)
        )

    def stage(self, seats: Int32, context_lens: Int32, size: int) -> None:
        """Send a step of `len(seats)` rows, padded to `size`, in one copy that nobody waits for."""
        pinned, sent = next(self._pinned)
        sent.synchronize()
        rows, count = pinned.numpy(), len(seats)
        rows[0, :count], rows[1, :count] = seats, context_lens
        rows[0, count:size], rows[1, count:size] = PADDING, 0
        self._staged.copy_(pinned, non_blocking=True)
        sent.record()


class TokenCopies:
    """Pinned buffers that take turns, so that a copy may be under way while the next one starts.

    Args:
        max_tokens: of one copy.
        depth: copies that may be outstanding.
    """

    def __init__(self, max_tokens: int, depth: int = 2) -> None:
        self._slots = _events(
            torch.empty(max_tokens, dtype=torch.int64, pin_memory=True) for _ in range(depth)
        )

    def start(self, tokens: torch.Tensor) -> "TokenCopy":
        """Copy `tokens: int64 [n]` behind everything that the current stream does before."""
        buffer, event = next(self._slots)
        buffer[: len(tokens)].copy_(tokens, non_blocking=True)
        event.record()
        return TokenCopy(buffer[: len(tokens)], event)


@dataclass(frozen=True, slots=True)
class TokenCopy:
    """One copy; its buffer is used again when `depth` more have started."""

    buffer: torch.Tensor
    arrived: torch.cuda.Event

    def wait(self) -> list[int]:
        self.arrived.synchronize()
        tokens: list[int] = self.buffer.tolist()
        return tokens
