"""Buffers between host and device that are made once: a step's way in, and its tokens' way out."""

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from nanovllm.engine.decode_state import NO_BLOCK, PADDING, Int32

PADDING_MAIL = np.array([[PADDING], [0], [NO_BLOCK]], dtype=np.int32)
"""Seat, context length and new block of a row that is not there."""


def timed_event() -> torch.cuda.Event:
    """An event that tells when the device reached it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DecodeInputs:
    """The static inputs of decode steps, and the mail between host and device.

    The device counts the decode steps that it has done, the host those that it has launched; the
    mail of a step is in the slots of its number modulo 2.

    Attributes:
        to_device: int32 [2, 3, max_rows] pinned, the seats, context lengths and new blocks of a
            step, see `decode_inputs`.
        to_host: int64 [2, max_rows] pinned, the tokens of a step; -1 where none could be drawn.
        turn: int64 [1], the steps done.
        seats, context_lens: int32 [max_rows], out of the mail.
        input_ids, positions, slot_mapping: int64 [max_rows], derived from these on the device.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.to_device = torch.empty(2, 3, max_rows, dtype=torch.int32, pin_memory=True)
        self.to_host = torch.empty(2, max_rows, dtype=torch.int64, pin_memory=True)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.seats = torch.full((max_rows,), PADDING, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros_like(self.seats)
        self.input_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.slot_mapping = torch.zeros_like(self.input_ids)
        self.cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._done = (timed_event(), timed_event())
        self.restart()

    def restart(self) -> None:
        """Nothing launched; the device is idle."""
        self._launched = 0
        self.turn.zero_()
        self.to_device.numpy()[:] = PADDING_MAIL

    def recount(self) -> None:
        """After an interrupt, which may have come between a launch and its count; the device is
        idle."""
        self._launched = int(self.turn)

    def stage(self, seats: Int32, context_lens: Int32, new_blocks: Int32, size: int) -> None:
        """Mail a step of `len(seats)` rows, padded to `size`, that is launched next."""
        slot, count = self._launched % 2, len(seats)
        self._done[slot].synchronize()  # of the step before last, which the slot belonged to
        rows = self.to_device[slot].numpy()
        rows[:, :count] = seats, context_lens, new_blocks
        rows[:, count:size] = PADDING_MAIL

    def launched(self) -> None:
        """The step that was staged is on its way."""
        self._done[self._launched % 2].record()
        self._launched += 1

    def tokens_of_last(self, count: int) -> "TokenCopy":
        """Those of the step that was launched last, when it is done."""
        slot = (self._launched - 1) % 2
        return TokenCopy(self.to_host[slot, :count], self._done[slot])


class TokenCopies:
    """For steps without mail: pinned buffers that take turns, as one may be waited for while the
    next copy starts.

    Args:
        max_tokens: of one copy.
        depth: copies that may be outstanding.
    """

    def __init__(self, max_tokens: int, depth: int = 2) -> None:
        self._slots = cycle(
            (torch.empty(max_tokens, dtype=torch.int64, pin_memory=True), timed_event())
            for _ in range(depth)
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
