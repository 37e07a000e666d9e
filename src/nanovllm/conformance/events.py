"""What checks are told: one event for each call at the core door, and for what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanovllm.conformance.book import Book
from nanovllm.conformance.entries import Before, Entry, Flight
from nanovllm.conformance.protocol import (
    CacheStats,
    Finished,
    PoolView,
    RequestId,
    RequestOptions,
)
from nanovllm.conformance.shadow import Reading, ShadowKV
from nanovllm.conformance.verdicts import summary_of


@dataclass(frozen=True, slots=True)
class Started:
    """`hashes`: of blocks in a chain, by their tokens and the hash of their parent."""

    book: Book
    hashes: tuple[tuple[tuple[int, ...], str | None, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Added:
    """A request was offered; `refusal` is the engine's message if it refused it."""

    book: Book
    prompt: tuple[int, ...]
    max_tokens: int
    options: RequestOptions
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Planned:
    """The book has followed the plan; `before` is what it was when the plan was asked for."""

    book: Book
    before: Before
    flight: Flight


@dataclass(frozen=True, slots=True)
class Executed:
    """A plan in flight was executed: what each of its seatings read, in their order."""

    book: Book
    flight: Flight
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """Who ended, as the engine says, and as follows from the tokens."""

    book: Book
    flight: Flight
    tokens: Mapping[RequestId, int]
    ended: tuple[Finished, ...]
    expected: Mapping[RequestId, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """Plans raised; `live` are the requests that were alive."""

    book: Book
    flights: tuple[Flight, ...]
    live: frozenset[RequestId]
    ended: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """`alive` is whether the request was alive and not aborted already; `took` what the engine
    says."""

    book: Book
    request: int
    alive: bool
    took: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ended; `alone` is the completion and reason of the same request computed alone,
    without a cache, or None if the suite was not its model."""

    book: Book
    entry: Entry
    alone: tuple[list[int], str] | None


@dataclass(frozen=True, slots=True)
class State:
    """Between two calls. `pool_before` is the view at the previous state of the same book.

    Attributes:
        call: the call that led here.
        settled: nothing is in flight, and it is known what every request holds.
    """

    book: Book
    shadow: ShadowKV
    call: str
    settled: bool
    pool: PoolView | None = None
    pool_before: PoolView | None = None
    stats: CacheStats | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """With no arrivals, `steps` schedules were made for `requests`, of at most `bound`."""

    book: Book
    steps: int
    bound: int
    requests: tuple[Entry, ...]
    left: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Crashed:
    """The engine raised, died or fell silent in `call`."""

    book: Book
    call: str
    error: str

    @property
    def summary(self) -> str:
        """The error without its traceback, but for the place where it was raised."""
        return summary_of(self.error)


Event = (
    Started
    | Added
    | Planned
    | Executed
    | Committed
    | Failed
    | Aborted
    | Ended
    | State
    | Drained
    | Crashed
)
