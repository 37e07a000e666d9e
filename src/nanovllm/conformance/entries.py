"""What the book knows of one request, one row, one admission, one block's content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nanovllm.conformance.protocol import Plan, RequestId, RequestOptions, Row
from nanovllm.conformance.shadow import History, Span


class Derailed(Exception):  # noqa: N818
    """The engine did what cannot be followed further; whose check is on has said so already."""


class Unreadable(ValueError):  # noqa: N818
    """A log in which something is missing or out of place."""


@dataclass(eq=False, slots=True)
class Entry:
    """One sample of one request.

    Attributes:
        room: outputs after which it ends at the latest (SCH-7d).
        path: for each known token, the history up to it.
        seed: of the suite's model.
        forced: output number (from 1) -> the token that the model draws there.
        open_end: it may also end for reasons that tokens do not show: a stop string, NaN.
        num_computed: positions that committed steps computed, or found cached.
        num_planned: these and the ones in flight.
        num_pending: tokens that plans in flight will sample.
        epoch: counts admissions and departures, so that a row knows whether its table still holds.
        restored: a failed step left it alive; whether it keeps its table is not known.
        num_cached: tokens found cached at its first admission.
        is_twin: another request with the same first block was admitted by the same plan.
        overdue: it has all outputs there is room for, and the next plan has to give it up (SCH-7d).
        misled: its blocks do not hold its history: it was given such, or a step has failed.
        forgotten: the prefix cache was emptied while it was seated: what it holds and fills until
            it leaves need not be found.
    """

    id: RequestId
    prompt: tuple[int, ...]
    max_tokens: int
    options: RequestOptions
    room: int
    path: list[History]
    seed: int = 0
    forced: Mapping[int, int] = field(default_factory=dict)
    open_end: bool = False
    num_computed: int = 0
    num_planned: int = 0
    num_pending: int = 0
    table: tuple[int, ...] = ()
    seated: bool = False
    epoch: int = 0
    restored: bool = False
    aborting: bool = False
    reason: str | None = None
    num_cached: int | None = None
    num_admissions: int = 0
    num_preemptions: int = 0
    chunked: bool = False
    is_twin: bool = False
    misled: bool = False
    forgotten: bool = False
    overdue: bool = False

    def __repr__(self) -> str:
        return f"{name_of(self.id)} {list(self.prompt)} + {self.completion}"

    @property
    def num_known(self) -> int:
        return len(self.path)

    @property
    def is_cut(self) -> bool:
        """Whether it has to end now because there is no room for all that it asked for."""
        return self.max_tokens > self.room == self.num_known - len(self.prompt)

    @property
    def completion(self) -> list[int]:
        return [node.token for node in self.path[len(self.prompt) :]]

    def append(self, token: int) -> None:
        self.path.append(self.path[-1].then(token))

    def contents(self, block_size: int) -> list[History]:
        """The history that each full block of the known tokens ends."""
        return self.path[block_size - 1 :: block_size]

    def span(self, start: int, end: int, table: tuple[int, ...]) -> Span:
        return Span(self.path, start, end, table)


@dataclass(frozen=True, slots=True)
class Resident:
    """A full content that was computed in a block, by whom."""

    block: int
    content: History
    producer: Entry

    @property
    def generated(self) -> bool:
        """Whether it holds output tokens of whoever computed it."""
        return self.content.depth > len(self.producer.prompt)


@dataclass(frozen=True, slots=True)
class Seating:
    """A row, and how the book found its request: its table, its progress, what it knew then.

    Attributes:
        is_admission: it had no seat, and no failed step leaves open whether it has blocks.
    """

    entry: Entry
    row: Row
    kept: tuple[int, ...]
    num_planned: int
    num_known: int
    epoch: int
    is_admission: bool

    @property
    def samples(self) -> bool:
        return self.row.end == self.num_known

    @property
    def span(self) -> Span:
        return self.entry.span(self.row.start, self.row.end, self.row.block_table)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that got a seat by this plan.

    Attributes:
        num_known: tokens it knew.
        run: copies of its leading full blocks that must have been hittable, whatever the order in
            which the engine went through this plan.
    """

    seating: Seating
    num_known: int
    run: tuple[tuple[Resident, ...], ...]

    @property
    def entry(self) -> Entry:
        return self.seating.entry

    @property
    def num_cached(self) -> int:
        return self.seating.row.start

    def least(self, block_size: int) -> int:
        """Tokens that must be found cached (PFX-11)."""
        return block_size * min(len(self.run), (self.num_known - 1) // block_size)

    def missed(self, block_size: int) -> tuple[Resident, ...]:
        """Copies of the first block that should have been found and was not; or none."""
        if self.num_cached >= self.least(block_size):
            return ()
        return self.run[self.num_cached // block_size]


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan, its rows as the book took them, and what came of it.

    Attributes:
        strangers: rows of requests that are not alive.
        replaced: contents that gave way to its rows.
    """

    plan: Plan
    seatings: tuple[Seating, ...]
    strangers: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    replaced: tuple[Resident, ...] = ()


@dataclass(frozen=True, slots=True)
class Before:
    """The book as a plan found it."""

    seated: tuple[Entry, ...]
    queued: tuple[Entry, ...]
    tables: Mapping[RequestId, tuple[int, ...]]
    held: Mapping[int, int]
    resident: Mapping[int, Resident]
    released_at: Mapping[int, int]
    num_in_flight: int
    uncertain: bool
    num_live: int


def names_of(ids: Iterable[RequestId]) -> str:
    return ", ".join(map(name_of, ids))


def name_of(id: RequestId) -> str:
    return f"r{id.request}" if id.sample == 0 else f"r{id.request}.{id.sample}"
