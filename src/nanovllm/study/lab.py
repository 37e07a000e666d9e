"""Runs a workload at the core door of an engine, checked by the suite, and keeps what happened.

The suite plays the model with its shadow KV, so that a schedule which a study measures is also one
that is right: the first violation ends the study.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any

from nanovllm.conformance.adapters.reference import ReferenceCore, SchedulerFactory
from nanovllm.conformance.checks import CHECKS
from nanovllm.conformance.entries import Entry
from nanovllm.conformance.operations import Add
from nanovllm.conformance.panel import Panel
from nanovllm.conformance.protocol import Plan, RequestId, Row, World
from nanovllm.conformance.session import Session
from nanovllm.conformance.transport import local_door
from nanovllm.engine.scheduler import Scheduler
from nanovllm.study.workloads import Talk, Turn


@dataclass(frozen=True, slots=True)
class Step:
    """One plan, and the blocks that requests hold while it runs.

    Attributes:
        held_slots: of all blocks that somebody holds, a shared one counted once.
        empty_slots: of these, the ones that no token has come to yet.
        table_entries: of all running requests.
    """

    rows: tuple[Row, ...]
    num_running: int
    held_slots: int
    empty_slots: int
    table_entries: int

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(slots=True)
class Run:
    """What happened, request by request and step by step.

    Attributes:
        arrived, started, ended: request -> number of steps done before it came, was first given a
            row, and was complete.
        num_recomputed: tokens that were computed again for a request which had computed them.
        evaluations: requirement -> how often it was checked.
        door_seconds: CPU time of the engine's side of the door.
    """

    steps: list[Step] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    num_recomputed: int = 0
    evaluations: Counter[str] = field(default_factory=Counter)
    door_seconds: float = 0.0

    @property
    def num_computed(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    @property
    def num_preemptions(self) -> int:
        return sum(entry.num_preemptions for entry in self.entries)

    @property
    def hit_share(self) -> float:
        """Prompt tokens found in the cache at the first admission, of all prompt tokens."""
        cached = sum(entry.num_cached or 0 for entry in self.entries)
        return cached / sum(len(entry.prompt) for entry in self.entries)


class Clocked:
    """An adapter with the CPU time that its calls took."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._adapter, name)

        def call(*args: Any) -> Any:
            begin = process_time()
            try:
                return method(*args)
            finally:
                self.seconds += process_time() - begin

        return call


@contextmanager
def without_collections() -> Iterator[None]:
    """A collection of the suite's histories would be taken for time of the engine."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(
    world: World,
    talks: Iterable[Talk],
    scheduler_class: SchedulerFactory = Scheduler,
    unchecked: Collection[str] = (),
    seed_of: Callable[[int], int] = int,
) -> Run:
    """All talks to their end.

    Args:
        unchecked: requirements that this scheduler breaks, for studies of such schedulers.
        seed_of: request -> seed of the suite's model, in the place of sampling parameters; the
            request's own number if not given.

    Raises Violation where the engine breaks another one, ValueError if it refuses a request.
    """
    adapter = Clocked(ReferenceCore(scheduler_class))
    door = local_door(adapter)
    hello = door.hello()
    # A look at the whole pool after each call is for pools smaller than these.
    hello = replace(hello, capabilities=hello.capabilities - {"pool"})
    panel = Panel(hello.capabilities, {check.spec_id for check in CHECKS} - set(unchecked))
    session = Session(door, hello, world, panel)
    session.start()
    adapter.seconds = 0.0
    with without_collections():
        result = _Driver(session, seed_of).drive(talks)
    assert not panel.errors, panel.errors
    result.evaluations = panel.evaluations.counts
    result.door_seconds = adapter.seconds
    return result


class _Driver:
    """Offers requests when they are due, and notes every step."""

    def __init__(self, session: Session, seed_of: Callable[[int], int]) -> None:
        self.session = session
        self.seed_of = seed_of
        self.result = Run()
        self._clock = 0
        self._later: dict[int, tuple[Turn, ...]] = {}  # by request: the turns behind it
        self._reached: dict[RequestId, int] = {}

    def drive(self, talks: Iterable[Talk]) -> Run:
        coming = deque(sorted(talks, key=lambda talk: talk.arrives))
        while coming or self.session.book.live:
            while coming and (coming[0].arrives <= self._clock or not self.session.book.live):
                talk = coming.popleft()
                self._clock = max(self._clock, talk.arrives)
                self._ask((), talk.turns)
            self._step()
        self.result.entries = list(self.session.book.entries.values())
        return self.result

    def _ask(self, before: tuple[int, ...], turns: tuple[Turn, ...]) -> None:
        request, first = self.session.num_requests, turns[0]
        asked = Add(request, before + first.tokens, first.max_tokens, seed=self.seed_of(request))
        if not self.session.add(asked):
            raise ValueError(f"the workload does not fit this world: {asked.refused}")
        self.result.arrived[request] = self._clock
        self._later[request] = turns[1:]

    def _step(self) -> None:
        live = list(self.session.book.live.values())
        plan = self.session.schedule().plan
        self._note(plan)
        self.session.land()
        self._clock += 1
        for entry in live:
            if entry.reason is None:
                continue
            request = entry.id.request
            self.result.ended[request] = self._clock
            if self._later[request]:
                said = tuple(node.token for node in entry.path)
                self._ask(said, self._later[request])

    def _note(self, plan: Plan) -> None:
        book, size = self.session.book, self.session.world.block_size
        seated = book.seated
        for row in plan.rows:
            self.result.started.setdefault(row.id.request, self._clock)
            reached = self._reached.get(row.id, row.start)
            self.result.num_recomputed += max(0, min(row.end, reached) - row.start)
            self._reached[row.id] = max(row.end, reached)
        entries = sum(len(entry.table) for entry in seated)
        step = Step(
            rows=plan.rows,
            num_running=len(seated),
            held_slots=size * sum(count > 0 for count in book.blocks.held.values()),
            # What is shared is full, so that only a request's own last block can have room.
            empty_slots=size * entries - sum(entry.num_planned for entry in seated),
            table_entries=entries,
        )
        self.result.steps.append(step)
