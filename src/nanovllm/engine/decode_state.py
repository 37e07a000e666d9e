"""What a decode step needs of each running sequence, kept on the device between steps.

A running sequence has a *seat*: a row of these tensors. A step then names seats and lengths only:
last tokens, block tables and sampling parameters do not travel again, and the next step can be
launched before the host has seen the tokens of this one.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledRow
from nanovllm.kernels.gumbel_noise import seed_streams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

PADDING = -1
"""The seat of a padding row. As an index it is the last one, which no sequence has."""


@dataclass(frozen=True, slots=True)
class SeatUpdates:
    """What changed since the last step, as arrays.

    Attributes:
        table_index, table_value: [N] entries of the block tables, by flat index.
        seats: [M] newly taken ones, with their `temperature` and `stream` of noise.
    """

    table_index: Int64
    table_value: Int32
    seats: Int64
    temperature: npt.NDArray[np.float32]
    stream: Int64

    @property
    def is_empty(self) -> bool:
        return not len(self.table_index) and not len(self.seats)


class DecodeState:
    """The device's side: tensors with a row per seat, and one more that padding writes to.

    Attributes:
        last_tokens: int64 [seats + 1], the newest token, not computed yet.
        block_tables: int32 [seats + 1, max_blocks].
        temperatures: float32 [seats + 1].
        streams: int64 [seats + 1], see `gumbel_noise.seed_streams`.
    """

    def __init__(self, num_seats: int, max_blocks: int, device: torch.device) -> None:
        rows = num_seats + 1
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.streams = torch.zeros(rows, dtype=torch.int64, device=device)

    def apply(self, updates: SeatUpdates) -> None:
        """Bring the tensors up to date; ordered with the kernels that read them by the stream."""

        def to_device(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array).to(self.last_tokens.device, non_blocking=True)

        if len(updates.table_index):
            index = to_device(updates.table_index)
            self.block_tables.view(-1).index_copy_(0, index, to_device(updates.table_value))
        if len(updates.seats):
            seats = to_device(updates.seats)
            self.temperatures.index_copy_(0, seats, to_device(updates.temperature))
            self.streams.index_copy_(0, seats, to_device(updates.stream))


class Seats:
    """The host's side: who sits where, and how much of each table the device has."""

    def __init__(self, num_seats: int, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.sitting: dict[int, tuple[int, Sequence]] = {}  # by seq_id
        self.free = list(range(num_seats))
        self.num_blocks = [0] * num_seats
        # Rows whose sampling the fused kernel does: nothing but a temperature.
        self.plain = np.zeros(num_seats, dtype=np.bool_)

    def take(self, rows: Seq[ScheduledRow]) -> tuple[Int32, SeatUpdates]:
        """The seat of each row, [R], and what the device does not know of them yet."""
        seats: list[int] = []
        index: list[int] = []
        values: list[int] = []
        newcomers: list[tuple[int, Sequence]] = []
        for row in rows:
            place = self.sitting.get(row.seq.seq_id)
            if place is None:
                place = (self._free_seat(), row.seq)
                self.sitting[row.seq.seq_id] = place
                newcomers.append(place)
            seat = place[0]
            known, table = self.num_blocks[seat], row.block_table
            if len(table) > known:
                first = seat * self.max_blocks + known
                index.extend(range(first, first + len(table) - known))
                values.extend(table[known:])
                self.num_blocks[seat] = len(table)
            seats.append(seat)
        return np.array(seats, dtype=np.int32), self._updates(index, values, newcomers)

    def _updates(
        self, index: list[int], values: list[int], newcomers: list[tuple[int, Sequence]]
    ) -> SeatUpdates:
        for seat, seq in newcomers:
            self.plain[seat] = seq.params.is_plain
        seeds = np.array([seq.params.seed for _, seq in newcomers], dtype=np.uint64)
        return SeatUpdates(
            np.array(index, dtype=np.int64),
            np.array(values, dtype=np.int32),
            np.array([seat for seat, _ in newcomers], dtype=np.int64),
            np.array([seq.params.temperature for _, seq in newcomers], dtype=np.float32),
            seed_streams(seeds),
        )

    def _free_seat(self) -> int:
        if not self.free:
            gone = [s for _, s in self.sitting.values() if s.status is not SequenceStatus.RUNNING]
            for seq in gone:
                self.leave(seq)
        return self.free.pop()

    def leave(self, seq: Sequence) -> None:
        """Give up the seat of `seq`, if it has one. Its next blocks are others (SCH-8)."""
        place = self.sitting.pop(seq.seq_id, None)
        if place is not None:
            self.num_blocks[place[0]] = 0
            self.free.append(place[0])
