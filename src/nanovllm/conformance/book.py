"""The suite's own book of every request and block, written from plans, tokens and answers alone.

It says what is right, whatever the engine's policy: it follows what the engine decides (who is
admitted, who gives way, which block is taken) and knows what follows from that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from nanovllm.conformance.entries import (
    Admission,
    Before,
    Derailed,
    Entry,
    Flight,
    Seating,
)
from nanovllm.conformance.holdings import Holdings
from nanovllm.conformance.operations import Add
from nanovllm.conformance.protocol import (
    Finished,
    Hello,
    Plan,
    RequestId,
    Row,
    World,
)
from nanovllm.conformance.shadow import History


class Book:
    """Requests, who holds which block, what must be hittable, when a block was let go.

    Attributes:
        blocks: who holds which, and what must be hittable.
        flights: plans not committed, oldest first.
        uncertain: whether a failed step left open what its requests still hold.
        is_stunned: no row was planned since a step failed.
        logged: a row without a token may have ended by an error, such as NaN.
    """

    def __init__(self, world: World, hello: Hello, *, logged: bool = False) -> None:
        self.world = world
        self.hello = hello
        self.logged = logged
        self.entries: dict[RequestId, Entry] = {}
        self.live: dict[RequestId, Entry] = {}
        self.blocks = Holdings(world.block_size)
        self.flights: deque[Flight] = deque()
        self.is_stunned = False
        self.events: Counter[str] = Counter()
        self._roots: dict[str | None, History] = {}

    # ---- reading ---------------------------------------------------------------------------

    @property
    def caches(self) -> bool:
        """Whether finding cached blocks can be asked for: no collisions were injected (PFX-11)."""
        has = "prefix_cache" in self.hello.capabilities
        return has and self.world.prefix_cache and self.world.hash == "real"

    @property
    def seated(self) -> list[Entry]:
        return [entry for entry in self.live.values() if entry.seated]

    @property
    def queued(self) -> list[Entry]:
        """Those that may be admitted; a sample may have to wait for the first one's prompt."""
        return [
            entry
            for entry in self.live.values()
            if not (entry.seated or entry.aborting or entry.restored) and self._may_start(entry)
        ]

    def _may_start(self, entry: Entry) -> bool:
        leader = self.entries[RequestId(entry.id.request, 0)]
        return entry is leader or bool(leader.completion)

    @property
    def uncertain(self) -> bool:
        return any(entry.restored for entry in self.live.values())

    def before(self) -> Before:
        return Before(
            seated=tuple(self.seated),
            queued=tuple(self.queued),
            tables={entry.id: entry.table for entry in self.seated},
            held=self.blocks.held.copy(),
            resident=dict(self.blocks.resident),
            released_at=dict(self.blocks.released_at),
            num_in_flight=len(self.flights),
            uncertain=self.uncertain,
            num_live=len(self.live),
        )

    def ending(self, entry: Entry, completion: Sequence[int]) -> str | None:
        """Why `completion` is the whole of it, if it is (SCH-12)."""
        eos = () if entry.options.ignore_eos else self.world.eos_token_ids
        if completion[-1] in eos or completion[-1] in entry.options.stop_token_ids:
            return "stop"
        return "length" if len(completion) >= entry.room else None

    def end_tokens(self, entry: Entry) -> tuple[int, ...]:
        eos = () if entry.options.ignore_eos else self.world.eos_token_ids
        return (*eos, *entry.options.stop_token_ids)

    # ---- requests --------------------------------------------------------------------------

    def add(self, asked: Add) -> None:
        """The engine took the request."""
        p, options = len(asked.prompt), asked.options
        slots = self.world.num_blocks * self.world.block_size
        room = min(asked.max_tokens, self.world.max_model_len - p, slots - p + 1)
        path = [self._roots.setdefault(options.salt, History.root(options.salt))]
        for token in asked.prompt:
            path.append(path[-1].then(token))
        for i in range(options.n):
            id = RequestId(asked.request, i)
            self.entries[id] = self.live[id] = Entry(
                id,
                asked.prompt,
                asked.max_tokens,
                options,
                room,
                path[1:],
                seed=asked.seed,
                forced=asked.forced,
                open_end=asked.open_end,
            )

    def abort(self, request: int) -> None:
        """It takes effect at once, for samples in flight at their commit (SCH-13)."""
        self.blocks.begin()
        flying = {seating.entry.id for flight in self.flights for seating in flight.seatings}
        for entry in [e for e in self.live.values() if e.id.request == request]:
            if entry.id in flying:
                entry.aborting = True
            else:
                self.end(entry, "abort")

    def end(self, entry: Entry, reason: str) -> None:
        entry.reason = reason
        self._vacate(entry)
        self.live.pop(entry.id, None)

    # ---- plans -----------------------------------------------------------------------------

    def plan(self, plan: Plan) -> Flight:
        """Who gave way, then who computes what; a plan with rows is in flight from now on."""
        self.blocks.begin()
        for id in plan.preempted:
            entry = self.live.get(id)
            if entry and (entry.seated or entry.restored):
                self._vacate(entry)
                entry.num_preemptions += 1
                self.events["preemption"] += 1
        for finished in plan.finished:
            if finished.id in self.live:
                self.end(self.live[finished.id], finished.reason)
        for source, target in plan.copies:
            self.blocks.copy(source, target)
        known = [row for row in plan.rows if row.id in self.live]
        strangers = tuple(row for row in plan.rows if row.id not in self.live)
        seatings = tuple(self._seat(row) for row in known)
        admissions = tuple(self._admit(s) for s in seatings if s.is_admission)
        self._note_twins(admissions)
        flight = Flight(plan, seatings, strangers, admissions, tuple(self.blocks.replaced))
        self.events["eviction"] += len(flight.replaced)
        if plan.rows:
            self.flights.append(flight)
            self.is_stunned = False
        return flight

    def _seat(self, row: Row) -> Seating:
        entry = self.live[row.id]
        is_admission = not entry.seated and not entry.restored
        if not entry.seated:
            entry.num_planned = entry.num_computed = row.start
            entry.epoch += 1
        seating = Seating(
            entry,
            row,
            kept=entry.table,
            num_planned=entry.num_planned,
            num_known=len(entry.path) + entry.num_pending,
            epoch=entry.epoch,
            is_admission=is_admission,
        )
        self._note_hits(seating)
        self.blocks.hold(entry, row.block_table, -(-row.start // self.world.block_size))
        entry.restored = False
        entry.num_planned = row.end
        entry.num_pending += seating.samples
        self.events["chunk"] += not seating.samples
        entry.chunked |= not seating.samples
        return seating

    def _admit(self, seating: Seating) -> Admission:
        entry, row = seating.entry, seating.row
        run = self.blocks.run(entry.contents(self.world.block_size))
        entry.num_admissions += 1
        if entry.num_cached is None:
            entry.num_cached = row.start
        return Admission(seating, len(entry.path), run)

    def _note_hits(self, seating: Seating) -> None:
        entry, row, bs = seating.entry, seating.row, self.world.block_size
        if seating.is_admission:
            used = [
                self.blocks.held[block_id] > 0 for block_id in row.block_table[: row.start // bs]
            ]
            self.events["hit on a used block"] += any(used)
            self.events["hit on a free block"] += not all(used)
            num_resident = len(self.blocks.run(entry.contents(bs)))
            self.events["whole prompt resident"] += num_resident * bs == entry.num_known

    def _note_twins(self, admissions: Sequence[Admission]) -> None:
        """Requests that begin with the same block, computed in the same plan (PFX-15)."""
        first = [a.entry.contents(self.world.block_size)[:1] for a in admissions]
        for admission, content in zip(admissions, first, strict=True):
            admission.entry.is_twin |= content != [] and first.count(content) > 1

    # ---- outcomes --------------------------------------------------------------------------

    def commit(
        self, tokens: Mapping[RequestId, int], told: Mapping[RequestId, str]
    ) -> dict[RequestId, str]:
        """The oldest plan was executed; returns who ends by it, and why.

        `told` is what the engine says, for those entries whose end nobody else can know.
        """
        self.blocks.begin()
        expected: dict[RequestId, str] = {}
        for seating in self.flights.popleft().seatings:
            entry = seating.entry
            if entry.reason is not None:
                continue  # planned ahead of its end: discarded
            entry.num_pending -= seating.samples
            if entry.aborting:
                expected[entry.id] = "abort"
                continue
            if self.logged and told.get(entry.id) == "error" and entry.id not in tokens:
                expected[entry.id] = "error"
                continue
            if seating.epoch == entry.epoch:
                entry.num_computed = seating.row.end
                table, bs = seating.row.block_table, self.world.block_size
                full = range(seating.row.start // bs, min(seating.row.end // bs, len(table)))
                self.blocks.publish(entry, table, full)
            if seating.samples:
                entry.append(tokens[entry.id])
                reason = self.ending(entry, entry.completion)
                if entry.open_end and told.get(entry.id) == "stop":
                    reason = "stop"
                entry.overdue = reason == "length" and entry.is_cut and entry.id not in told
                if reason is not None and not entry.overdue:
                    expected[entry.id] = reason
        return expected

    def settle(self, ended: Iterable[Finished], expected: Mapping[RequestId, str]) -> list[Entry]:
        """The engine says who ended. Where it differs from what is right, nothing can follow."""
        told = {finished.id: finished.reason for finished in ended}
        missing = [id for id, reason in expected.items() if id not in told and reason != "abort"]
        surprising = [id for id in told if id in self.live and id not in expected]
        done = [self.live[id] for id in expected if id in self.live]
        for entry in done:
            self.end(entry, told.get(entry.id, expected[entry.id]))
        if missing or surprising or not told.keys() <= self.entries.keys():
            raise Derailed(f"{missing} should have ended, {surprising} should not")
        return done

    def failing(self) -> tuple[Flight, ...]:
        """The plans that end if the oldest one raises (SCH-15).

        All that are in flight; but an engine that writes a log has launched them already, and lands
        the others, without the requests that the failed one has ended.
        """
        return tuple(self.flights)[: 1 if self.logged else None]

    def fail(self, ended: Iterable[Finished]) -> None:
        """The oldest plan raised.

        Whoever did not end is restored; whether it keeps its blocks shows in its next row.
        """
        self.blocks.begin()
        for finished in ended:
            if finished.id in self.live:
                self.live[finished.id].misled = True  # by what the step did not write
                self.end(self.live[finished.id], finished.reason)
        hit = {seating.entry for flight in self.failing() for seating in flight.seatings}
        for _ in self.failing():
            self.flights.popleft()
        self.is_stunned = True
        for entry in hit & set(self.live.values()):
            if entry.aborting:
                self.end(entry, "abort")
                continue
            entry.num_pending = 0
            self._vacate(entry)
            entry.restored = True

    def _vacate(self, entry: Entry) -> None:
        if entry.seated:
            self.blocks.release(entry)
        entry.restored = False
        entry.epoch += 1
