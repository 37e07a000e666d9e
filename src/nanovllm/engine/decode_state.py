"""What a decode step needs of each running sequence, kept on the device between steps.

A running sequence has a *seat*: a row of these tensors. A decode step then names seats, lengths and
new blocks only: last tokens, block tables and sampling parameters do not travel again, and the next
step can be launched before the host has seen the tokens of this one.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledRow
from nanovllm.kernels.gumbel_noise import seed_streams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def send(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy to a CUDA device without waiting for what it does.

    From memory that is not pinned, a copy may wait for all kernels before it.
    """
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


NO_BLOCK = -1
"""In place of a new block, where there is none."""

PADDING = -1
"""The seat of a padding row. As an index it is the last one, which no sequence has."""


@dataclass(frozen=True, slots=True)
class SeatUpdates:
    """What changed since the last step, as arrays.

    Attributes:
        table_index, table_value: [N] entries of the block tables, by flat index.
        seats: [M] newly taken ones, with their filters (top_k, top_p, min_p), `temperature` and
            `stream` of noise.
    """

    table_index: Int64
    table_value: Int32
    seats: Int64
    temperature: npt.NDArray[np.float32]
    top_k: Int32
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    stream: Int64

    @property
    def is_empty(self) -> bool:
        return not len(self.table_index) and not len(self.seats)


class DecodeState:
    """The device's side: tensors with a row per seat, and one more that padding writes to.

    Attributes:
        last_tokens: int64 [seats + 1], the newest token, not computed yet.
        block_tables: int32 [seats + 1, max_blocks].
        temperatures, top_p, min_p: float32 [seats + 1].
        top_k: int32 [seats + 1].
        streams: int64 [seats + 1], see `gumbel_noise.seed_streams`.
    """

    def __init__(self, num_seats: int, max_blocks: int, device: torch.device) -> None:
        rows = num_seats + 1
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.streams = torch.zeros(rows, dtype=torch.int64, device=device)

    def apply(self, updates: SeatUpdates) -> None:
        """Bring the tensors up to date; ordered with the kernels that read them by the stream."""
        device = self.last_tokens.device
        if len(updates.table_index):
            index = send(updates.table_index, device)
            self.block_tables.view(-1).index_copy_(0, index, send(updates.table_value, device))
        if len(updates.seats):
            seats = send(updates.seats, device)
            self.temperatures.index_copy_(0, seats, send(updates.temperature, device))
            self.top_k.index_copy_(0, seats, send(updates.top_k, device))
            self.top_p.index_copy_(0, seats, send(updates.top_p, device))
            self.min_p.index_copy_(0, seats, send(updates.min_p, device))
            self.streams.index_copy_(0, seats, send(updates.stream, device))


class Seat(NamedTuple):
    """A place, who sits there, and whether the device's kernels do its sampling."""

    place: int
    seq: Sequence
    plain: bool


class Taken(NamedTuple):
    """What the rows of a step are told.

    Attributes:
        seats: int32 [R].
        new_blocks: int32 [R], the block of a row's position if the device does not know it yet,
            else `NO_BLOCK`; of decode steps only.
        updates: what else the device does not know yet.
    """

    seats: Int32
    new_blocks: Int32
    updates: SeatUpdates


class Seats:
    """The host's side: who sits where, and how much of each table the device has."""

    def __init__(self, num_seats: int, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.sitting: dict[int, Seat] = {}  # by seq_id
        self.free = list(range(num_seats))
        self.num_blocks = [0] * num_seats
        self.plain = np.zeros(num_seats, dtype=np.bool_)
        self.has_token = [False] * num_seats  # the newest of who sits there, drawn by its last step

    def take(self, rows: Seq[ScheduledRow], decodes: bool) -> Taken:
        """Seat the rows of a step; `decodes`: each of them computes its last position."""
        seats: list[int] = []
        new_blocks: list[int] = []
        index: list[int] = []
        values: list[int] = []
        newcomers: list[Seat] = []
        for row in rows:
            seat = self.sitting.get(row.seq.seq_id)
            if seat is None:
                seat = Seat(self._free_place(rows), row.seq, row.seq.params.is_plain)
                self.sitting[row.seq.seq_id] = seat
                newcomers.append(seat)
            place, table = seat.place, row.block_table
            self.has_token[place] = row.samples
            known = self.num_blocks[place]
            self.num_blocks[place] = len(table)
            new_block = NO_BLOCK
            if decodes and len(table) == known + 1:
                new_block = table[known]
            elif len(table) > known:
                first = place * self.max_blocks + known
                index.extend(range(first, first + len(table) - known))
                values.extend(table[known:])
            seats.append(place)
            new_blocks.append(new_block)
        updates = self._updates(index, values, newcomers)
        return Taken(np.array(seats, dtype=np.int32), np.array(new_blocks, dtype=np.int32), updates)

    def _updates(self, index: list[int], values: list[int], newcomers: list[Seat]) -> SeatUpdates:
        for seat in newcomers:
            self.plain[seat.place] = seat.plain
        params = [seat.seq.params for seat in newcomers]
        return SeatUpdates(
            np.array(index, dtype=np.int64),
            np.array(values, dtype=np.int32),
            np.array([seat.place for seat in newcomers], dtype=np.int64),
            np.array([p.temperature for p in params], dtype=np.float32),
            np.array([p.top_k for p in params], dtype=np.int32),
            np.array([p.top_p for p in params], dtype=np.float32),
            np.array([p.min_p for p in params], dtype=np.float32),
            seed_streams(np.array([p.seed for p in params], dtype=np.uint64)),
        )

    def knows(self, seq: Sequence) -> bool:
        """Whether the newest token of `seq` is on the device, or will be: its last step draws it.

        One that was preempted and comes back in chunks has a seat before it has that.
        """
        seat = self.sitting.get(seq.seq_id)
        return seat is not None and self.has_token[seat.place]

    def is_plain(self, seq: Sequence) -> bool:
        """Whether the device's kernels do the sampling of `seq`."""
        seat = self.sitting.get(seq.seq_id)
        return seat.plain if seat else seq.params.is_plain

    def _free_place(self, rows: Seq[ScheduledRow]) -> int:
        """One that nobody in these rows has: a row may have ended since it was planned."""
        if not self.free:
            needed = {row.seq.seq_id for row in rows}
            seqs = [seat.seq for seat in self.sitting.values()]
            for seq in seqs:
                if seq.status is not SequenceStatus.RUNNING and seq.seq_id not in needed:
                    self.leave(seq)
        return self.free.pop()

    def leave(self, seq: Sequence) -> None:
        """Give up the seat of `seq`, if it has one. Its next blocks are others (SCH-8)."""
        seat = self.sitting.pop(seq.seq_id, None)
        if seat is not None:
            self.num_blocks[seat.place] = 0
            self.free.append(seat.place)
