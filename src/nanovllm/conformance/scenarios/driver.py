"""Runs requests through a core door, with a model that cannot be fooled.

Every slot of the pool holds a digest of the token history that was computed there, and the next
token depends on every digest that its row reads. So a wrong block, a stale hit or a slot read
before it is written changes the output, and `expect_alone` sees it, whatever the engine did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from nanovllm.conformance.protocol import (
    CoreDoor,
    Finished,
    Plan,
    RequestId,
    RequestOptions,
    Row,
    World,
)
from nanovllm.conformance.scenarios.track import Admission, Track, ceil_div, digests
from nanovllm.conformance.verdicts import Evaluations, Violation

Look = Callable[[Plan], None]


class Bench:
    """A core door that was just reset, and its requests.

    Args:
        world: what the door is reset to.
        seen: counts what is put to the test.
    """

    def __init__(self, door: CoreDoor, world: World, seen: Evaluations) -> None:
        self.door = door
        self.world = world
        self.seen = seen
        self.ahead = door.hello().ahead
        self.tracks: dict[RequestId, Track] = {}
        self.plans: list[Plan] = []
        self.num_requests = 0
        self._slots: dict[int, list[int | None]] = {}
        door.reset(world)

    # ---- the calls -------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        forced: Sequence[int] = (),
        options: RequestOptions | None = None,
    ) -> Track:
        """Queue a request and return its sample 0; `forced` are its first outputs.

        Raises Refused.
        """
        options = options or RequestOptions()
        number = self.num_requests
        self.num_requests += 1
        self.door.add(number, list(prompt), max_tokens, options)
        samples = [
            Track(RequestId(number, i), tuple(prompt), max_tokens, tuple(forced))
            for i in range(options.n)
        ]
        self.tracks.update((track.id, track) for track in samples)
        return samples[0]

    def schedule(self) -> Plan:
        """Ask for a plan, and note who is seated and which blocks were taken."""
        plan = self.door.schedule()
        self.plans.append(plan)
        for id in plan.preempted:
            track = self.tracks[id]
            track.table = ()
            track.num_preempted += 1
        self._end(plan.finished)
        taken = {row.id: self._taken(row) for row in plan.rows}
        self.expect(len(taken) == len(plan.rows), "SCH-4", "a request has two rows:", plan.rows)
        for row in plan.rows:
            others = {block for id, blocks in taken.items() if id != row.id for block in blocks}
            self._seat(row, others)
        for blocks in taken.values():
            for block in blocks:
                self._slots.pop(block, None)
        return plan

    def commit(self, plan: Plan) -> list[Finished]:
        """Execute a plan, all writes before all reads, and give the engine its tokens."""
        for source, target in plan.copies:
            self._slots[target] = list(self._block(source))
        for row in plan.rows:
            self._write(row)
        tokens: dict[RequestId, int] = {}
        for row in plan.rows:
            track = self.tracks[row.id]
            if row.end == len(track.tokens):
                tokens[row.id] = track.draw(self._read(row))
        for id, token in tokens.items():
            if self.tracks[id].reason is None:
                self.tracks[id].tokens.append(token)
        ended = self.door.commit(plan.step, tokens)
        self._end(ended)
        return ended

    def fail_step(self, plan: Plan) -> list[Finished]:
        """The plan raised: what it was to write is garbage."""
        for row in plan.rows:
            for i in range(row.start, row.end):
                self._store(row, i, None)
        ended = self.door.fail_step(plan.step)
        self._end(ended)
        for row in plan.rows:
            track = self.tracks[row.id]
            if track.reason is None:  # restored: it begins anew, or goes on where it was
                track.table = ()
        return ended

    def abort(self, track: Track) -> bool:
        """True if the engine says that it took; the tokens end at most here."""
        return self.door.abort(track.id.request)

    # ---- whole runs ------------------------------------------------------------------------

    @property
    def live(self) -> list[Track]:
        return [track for track in self.tracks.values() if track.reason is None]

    def step(self, look: Look | None = None) -> Plan:
        """Schedule and, if there is something to execute, `look` at it and commit."""
        plan = self.schedule()
        if plan.rows:
            if look:
                look(plan)
            self.commit(plan)
        return plan

    def steps(self, spec_id: str = "SCH-6", look: Look | None = None) -> Iterator[Plan]:
        """Step until nothing is left, within the bound of SCH-6; yields what was executed.

        `spec_id` is the requirement that the engine breaks if it does not come to an end.
        """
        live = self.live
        work = sum(len(track.tokens) + track.max_tokens for track in live)
        bound = len(live) * work + len(live) + self.ahead
        for _ in range(bound):
            if not self.live:
                break
            yield self.step(look)
        if self.live:
            raise Violation(spec_id, f"after {bound} steps {self.live} are not done")
        for _ in range(self.ahead):  # what was planned ahead of an end
            self.step()

    def drain(self, spec_id: str = "SCH-6", look: Look | None = None) -> list[Plan]:
        """Run until nothing is left; returns the plans."""
        return list(self.steps(spec_id, look))

    def until(self, condition: Callable[[], object]) -> None:
        """Step until the condition holds or nothing is left."""
        if not condition():
            for _ in self.steps():
                if condition():
                    return

    def run(self, prompt: Sequence[int], max_tokens: int = 1, *, spec_id: str = "SCH-6") -> Track:
        """Add a request and run until everything has ended; `spec_id` as of `steps`."""
        track = self.add(prompt, max_tokens)
        self.drain(spec_id)
        return track

    # ---- what is right ---------------------------------------------------------------------

    def expect(self, holds: object, spec_id: str, *message: object) -> None:
        self.seen.require(holds, spec_id, *message)

    def expect_alone(self, track: Track, spec_id: str) -> None:
        """Its tokens so far are what it gives alone, computed without a cache."""
        tokens = list(track.prompt)
        for _ in track.completion:
            tokens.append(track.draw(digests(tokens)))
        expected = tokens[len(track.prompt) :]
        self.expect(track.tokens == tokens, spec_id, track, "gives alone", expected)

    def expect_complete(self, track: Track, spec_id: str) -> None:
        """It ended by its length, with the tokens that it gives alone."""
        got = len(track.completion), track.reason
        wanted = track.max_tokens, "length"
        self.expect(got == wanted, spec_id, track, f"ended as {got}, expected {wanted}")
        self.expect_alone(track, spec_id)

    def expect_hits(self, track: Track, spec_id: str, which: int = 0) -> None:
        """It found all that was resident when it was admitted the `which`-th time (PFX-11)."""
        admission = track.admissions[which]
        bs, n, r = self.world.block_size, admission.known, admission.resident
        least = bs * min(r, (n - 1) // bs)
        most = n - 1 if r * bs == n else least
        said = (
            f"{track} was admitted with {n} known tokens, {r} leading full blocks resident, and "
            f"{admission.cached} cached tokens; expected {least}"
        )
        self.expect(admission.cached >= least, spec_id, said)
        self.expect(admission.cached <= most, "PFX-4", said)

    def resident(self, tokens: Sequence[int], without: Collection[int] = ()) -> int:
        """Leading full blocks of `tokens` that the pool still holds, some blocks excepted."""
        bs, own = self.world.block_size, digests(tokens)
        full = len(tokens) // bs
        held = {tuple(slots) for block, slots in self._slots.items() if block not in without}
        missing = (i for i in range(full) if tuple(own[i * bs : (i + 1) * bs]) not in held)
        return next(missing, full)

    # ---- slots -----------------------------------------------------------------------------

    def _taken(self, row: Row) -> tuple[int, ...]:
        """Blocks that a row has and its request did not have before, hits excepted."""
        if row.id not in self.tracks:
            raise Violation("SCH-4", f"a row of {row.id}, which was never added")
        track = self.tracks[row.id]
        known = len(track.tokens)
        where = "positions", row.start, "to", row.end, "of the", known, "known of", track
        self.expect(row.count > 0, "PFX-6" if row.start == known else "SCH-4", *where)
        self.expect(row.start >= 0 and row.end <= known, "KV-7", *where)
        self._check_place(track, row)
        num_kept = len(track.table) or ceil_div(row.start, self.world.block_size)
        return row.block_table[num_kept:]

    def _check_place(self, track: Track, row: Row) -> None:
        if track.reason == "abort" and self.ahead == 0:
            raise Violation("SCH-13", f"{track} was aborted and has a row")
        if track.is_seated:
            computed = track.rows[-1].end
            where = track, "goes on at position", row.start, "computed are", computed
            self.expect(row.start <= computed, "KV-5", *where)

    def _seat(self, row: Row, taken_by_others: Collection[int]) -> None:
        """If it is admitted, what others took in this plan may have been gone by then."""
        track = self.tracks[row.id]
        if not track.is_seated:
            resident = self.resident(track.tokens, taken_by_others)
            track.admissions.append(Admission(len(track.tokens), resident, row))
        if track.reason is None:
            track.table = row.block_table
        track.rows.append(row)

    def _end(self, finished: Sequence[Finished]) -> None:
        for one in finished:
            track = self.tracks[one.id]
            track.reason, track.table = one.reason, ()

    def _write(self, row: Row) -> None:
        own = digests(self.tracks[row.id].tokens[: row.end])
        for i in range(row.start, row.end):
            self._store(row, i, own[i])

    def _read(self, row: Row) -> list[int]:
        bs = self.world.block_size
        found = [
            self._block(row.block_table[i // bs])[i % bs]
            for i in range(row.end)
            if i // bs < len(row.block_table)
        ]
        return [digest or 0 for digest in found]

    def _store(self, row: Row, i: int, digest: int | None) -> None:
        index, offset = divmod(i, self.world.block_size)
        if index >= len(row.block_table):
            raise Violation(
                "BLK-4", f"{list(row.block_table)} has no block for position {i} of {row.id}"
            )
        self._block(row.block_table[index])[offset] = digest

    def _block(self, block: int) -> list[int | None]:
        return self._slots.setdefault(block, [None] * self.world.block_size)
