"""Drives a core door, plays its model with the shadow KV, and tells the checks what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from nanovllm.conformance.book import Book
from nanovllm.conformance.entries import Derailed, Entry, Flight
from nanovllm.conformance.events import (
    Aborted,
    Added,
    Committed,
    Crashed,
    Drained,
    Ended,
    Event,
    Executed,
    Failed,
    Planned,
    Started,
    State,
)
from nanovllm.conformance.model import Model
from nanovllm.conformance.operations import (
    Abort,
    Add,
    Commit,
    FailStep,
    Operation,
    ResetPrefixCache,
    Schedule,
)
from nanovllm.conformance.panel import Panel
from nanovllm.conformance.protocol import (
    CoreDoor,
    EngineFault,
    Hello,
    Plan,
    PoolView,
    Refused,
    RequestId,
    World,
)
from nanovllm.conformance.shadow import Reading, ShadowKV

T = TypeVar("T")


class Session:
    """One engine that was just reset, and all that was done with it.

    Args:
        door: of an engine that said `hello`.
        panel: hears every event.
        logged: what happened is read from a log: `commit` is given the tokens, and a row without
            one may have ended by an error.

    Every call may raise `Violation`, and `Derailed` when the engine did what cannot be followed;
    after either, nothing more can be judged. `operations` has what was done until then.
    """

    def __init__(
        self, door: CoreDoor, hello: Hello, world: World, panel: Panel, *, logged: bool = False
    ) -> None:
        self.door = door
        self.hello = hello
        self.world = world
        self.panel = panel
        self.logged = logged
        self.book = Book(world, hello, logged=logged)
        self.model = Model(self.book)
        self.shadow = ShadowKV(world.block_size)
        self.operations: list[Operation] = []
        self.num_requests = 0
        self._pool: PoolView | None = None
        self._num_asked: int | None = None
        self._polled: Plan | None = None

    def start(self) -> None:
        """Reset the engine; Refused or Unsupported if it does not offer this world."""
        self.door.reset(self.world)
        self._tell(Started(self.book, self._hashes()))
        self._look("reset")

    # ---- the calls -------------------------------------------------------------------------

    def add(self, operation: Add) -> bool:
        """Offer a request; whether the engine took it."""
        self.operations.append(operation)
        self.num_requests += 1
        op, asked = operation, (operation.prompt, operation.max_tokens, operation.options)
        try:
            self._call("add", partial(self.door.add, op.request, *asked))
        except Refused as error:
            op.refused = str(error)
        self._tell(Added(self.book, *asked, op.refused))
        if op.refused is None:
            slots = self.world.num_blocks * self.world.block_size
            most = min(slots, self.world.max_model_len - 1)
            if not 1 <= len(op.prompt) <= most or op.max_tokens < 1:
                raise Derailed("what can never run was accepted")
            self.book.add(op)
        self._look("add")
        return op.refused is None

    def schedule(self) -> Schedule:
        operation = Schedule()
        self.operations.append(operation)
        before = self.book.before()
        operation.plan = self._polled or self._call("schedule", self.door.schedule)
        self._polled = None
        flight = self.book.plan(operation.plan)
        self._tell(Planned(self.book, before, flight))
        rows = operation.plan.rows
        known = all(s.row.start >= 0 and s.row.end <= s.num_known for s in flight.seatings)
        if flight.strangers or not known or len({row.id for row in rows}) < len(rows):
            raise Derailed("rows that cannot be executed")
        if not before.num_in_flight and any(entry.overdue for entry in self.book.live.values()):
            raise Derailed("a request goes on for which there is no room")
        operation.pool = self._look("schedule")
        return operation

    def commit(self, tokens: Mapping[RequestId, int] | None = None) -> Commit:
        """Execute the oldest plan in flight; `tokens` of a log."""
        flight = self.book.flights[0]
        operation = Commit(flight.plan.step)
        self.operations.append(operation)
        readings = self.shadow.execute(flight.plan.copies, [s.span for s in flight.seatings])
        self._tell(Executed(self.book, flight, readings))
        self._note_misled(flight, readings)
        drawn = self.model.draw(flight, readings) if tokens is None else dict(tokens)
        operation.tokens = drawn
        ended = self._call("commit", partial(self.door.commit, flight.plan.step, drawn))
        operation.finished = tuple(ended)
        told = {finished.id: finished.reason for finished in ended}
        expected = self.book.commit(drawn, told)
        self._tell(Committed(self.book, flight, drawn, operation.finished, expected))
        self._erase(flight, expected)
        for entry in self.book.settle(ended, expected):
            self._ended(entry)
        operation.pool = self._look("commit")
        return operation

    def fail_step(self) -> FailStep:
        """The oldest plan in flight raises; those planned after it are void, but for a log's."""
        flights = self.book.failing()
        operation = FailStep(flights[0].plan.step)
        self.operations.append(operation)
        for flight in flights:
            self.shadow.spoil(flight.plan.copies, [s.span for s in flight.seatings])
        ended = self._call("fail_step", partial(self.door.fail_step, operation.step))
        operation.finished = tuple(ended)
        live = frozenset(self.book.live)
        self._tell(Failed(self.book, flights, live, operation.finished))
        self.book.fail(ended)
        for id in live - self.book.live.keys():
            self._ended(self.book.entries[id])
        self._look("fail_step")
        return operation

    def abort(self, request: int) -> bool:
        operation = Abort(request)
        self.operations.append(operation)
        mine = [e for e in self.book.live.values() if e.id.request == request]
        alive = any(not entry.aborting for entry in mine)
        operation.took = self._call("abort", partial(self.door.abort, request))
        self._tell(Aborted(self.book, request, alive, operation.took))
        if operation.took is not alive:
            raise Derailed("whether the request was aborted is not known")
        if alive:
            self.book.abort(request)
            for entry in mine:
                if entry.reason is not None:
                    self._ended(entry)
        self._look("abort")
        return operation.took

    @property
    def asked(self) -> list[Operation]:
        """What was done before the final drain."""
        return self.operations[: self._num_asked]

    def forget_prefixes(self) -> None:
        """The engine emptied its prefix cache."""
        self.operations.append(ResetPrefixCache())
        self.book.blocks.forget_all()
        for entry in self.book.live.values():
            entry.forgotten = entry.seated

    # ---- whole runs ------------------------------------------------------------------------

    @property
    def may_schedule(self) -> bool:
        return len(self.book.flights) <= self.hello.ahead

    def step(self) -> Plan:
        """Commit what is in flight, then schedule and commit."""
        self.land()
        plan = self.schedule().plan
        self.land()
        return plan

    def land(self) -> None:
        while self.book.flights:
            self.commit()

    def drain(self) -> None:
        """Run until nothing is left, within the bound of SCH-6."""
        self._num_asked = len(self.operations)
        self.land()
        requests = tuple(self.book.live.values())
        work = sum(len(entry.prompt) + entry.room for entry in requests)
        bound = len(requests) * work + len(requests) + self.hello.ahead
        steps = 0
        while self.book.live and steps < bound:
            steps += 1
            plan = self.step()
            if not (plan.rows or plan.preempted or plan.finished):
                steps += self._poll(bound - steps)
        self._tell(Drained(self.book, steps, bound, requests, tuple(self.book.live.values())))

    def _poll(self, most: int) -> int:
        """Ask an engine that does nothing again, without a look at each answer; how often.

        A plan that is not empty is kept for the next `schedule`.
        """
        for i in range(most):
            plan = self._call("schedule", self.door.schedule)
            if plan.rows or plan.preempted or plan.finished:
                self._polled = plan
                return i
        return most

    def _note_misled(self, flight: Flight, readings: Sequence[Reading]) -> None:
        for seating, reading in zip(flight.seatings, readings, strict=True):
            if not seating.kept:
                seating.entry.misled = any(
                    misread.position < seating.row.start and misread.before is not misread.wanted
                    for misread in reading.misreads
                )

    def _erase(self, flight: Flight, expected: Mapping[RequestId, str]) -> None:
        for seating in flight.seatings:
            if expected.get(seating.entry.id) == "error":
                self.shadow.erase(seating.span)

    # ---- what is told ----------------------------------------------------------------------

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except EngineFault as error:
            self._tell(Crashed(self.book, name, str(error)))
            raise Derailed(f"{name}: {error}") from error

    def _tell(self, event: Event) -> None:
        self.panel.hear(event)

    def _ended(self, entry: Entry) -> None:
        self._tell(Ended(self.book, entry, None if self.logged else self.model.alone(entry)))

    def _look(self, call: str) -> PoolView | None:
        """Between two calls: what the engine shows of itself."""
        capabilities, book = self.hello.capabilities, self.book
        pool = self._call("pool", self.door.pool) if "pool" in capabilities else None
        stats = self._call("stats", self.door.stats) if "stats" in capabilities else None
        flying = (seating for flight in book.flights for seating in flight.seatings)
        settled = not book.uncertain and all(s.epoch == s.entry.epoch for s in flying)
        self._tell(State(book, self.shadow, call, settled, pool, self._pool, stats))
        self._pool = pool
        return pool

    def _hashes(self) -> tuple[tuple[tuple[int, ...], str | None, str], ...]:
        """Of blocks that a careless encoding confuses, at the root and behind the first; twice."""
        if "hash" not in self.hello.capabilities:
            return ()
        bs = self.world.block_size
        starts = [(1, 1), (1, 2), (2, 1), (1, 23), (12, 3), (257, 1), (65537, 1)]
        blocks = list(dict.fromkeys((*start, *[1] * bs)[:bs] for start in starts))
        first = self._call("hash", partial(self.door.hash, blocks[0], None))
        asked = [(tokens, parent) for tokens in blocks for parent in (None, first)] * 2
        return tuple((t, p, self._call("hash", partial(self.door.hash, t, p))) for t, p in asked)
