"""The plan of one forward pass: what the scheduler decides and the model runner executes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from nanovllm.engine.sequence import Sequence


class StepKind(StrEnum):
    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class ScheduledRow(NamedTuple):
    """Compute the positions `[start, start + count)` of `seq`.

    Attributes:
        block_table: a snapshot that covers exactly these positions (BLK-4).
        samples: whether the row reaches the newest token, so that the next one is drawn. That token
            may itself be still to be drawn, by a step in flight.
    """

    seq: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs of a row
    block_table: array[int]
    samples: bool

    @classmethod
    def next_of(cls, seq: Sequence, count: int) -> ScheduledRow:
        """The next `count` positions of `seq`, behind those that are computed or in flight."""
        start = seq.num_computed_tokens + seq.num_in_flight_tokens
        newest = seq.num_tokens + seq.num_pending_tokens
        return cls(seq, start, count, seq.block_table[:], start + count == newest)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        """Whether it computes just one sampled token."""
        return self.count == 1 and self.start >= self.seq.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Rows of one forward pass, at most one per sequence (SCH-4); immutable once returned."""

    step_id: int
    rows: tuple[ScheduledRow, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def kind(self) -> StepKind:
        kinds = {row.is_decode for row in self.rows}
        if not kinds:
            return StepKind.IDLE
        if len(kinds) == 2:
            return StepKind.MIXED
        return StepKind.DECODE if kinds.pop() else StepKind.PREFILL


@dataclass(slots=True)
class StepBuilder:
    """A plan in the making: rows so far and the token budget that is left (SCH-2)."""

    budget: int
    rows: list[ScheduledRow] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, count: int) -> None:
        assert 1 <= count <= self.budget, f"{count} tokens into a budget of {self.budget}"
        self.budget -= count
        self.rows.append(ScheduledRow.next_of(seq, count))

    def build(self, step_id: int) -> ScheduledStep:
        return ScheduledStep(step_id, tuple(self.rows), tuple(self.preempted))
