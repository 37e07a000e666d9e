"""A core door that plans one step ahead: paged blocks, aborts, whole prompts, no prefix cache.

A second plan is made before the tokens of the first are known, so it may hold a row of a request
that the first one ends; that row is computed and thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nanovllm.conformance.protocol import (
    Finished,
    Hello,
    Plan,
    PoolView,
    Refused,
    RequestId,
    RequestOptions,
    Row,
    World,
)


@dataclass(eq=False)
class Job:
    id: RequestId
    num_prompt: int
    tokens: list[int]
    end: int
    ignore_eos: bool
    table: list[int] = field(default_factory=list)
    num_planned: int = 0
    num_pending: int = 0  # tokens in flight
    aborted: bool = False
    done: bool = False

    @property
    def num_known(self) -> int:
        return len(self.tokens) + self.num_pending


class AheadCore:
    """First come, first served; whoever arrived last gives way, but nobody who is in flight."""

    ahead = 1

    def hello(self) -> Hello:
        capabilities = frozenset({"abort", "pool"})
        return Hello("ahead", "1", ("core",), capabilities, ahead=self.ahead)

    def reset(self, world: World) -> None:
        self.world = world
        self.free = list(range(world.num_blocks))
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.flights: dict[int, list[Job]] = {}
        self.num_steps = 0
        self.num_discarded = 0

    def add(
        self, request: int, prompt: Sequence[int], max_tokens: int, options: RequestOptions
    ) -> None:
        p, world = len(prompt), self.world
        stored = p + max_tokens - 1
        slots = min(world.num_blocks * world.block_size, world.max_num_batched_tokens)
        if not 0 < p < world.max_model_len or max_tokens < 1 or stored > slots:
            raise Refused(f"p={p} max_tokens={max_tokens} blocks={-(-p // world.block_size)}")
        end = min(p + max_tokens, world.max_model_len)
        job = Job(RequestId(request), p, list(prompt), end, options.ignore_eos)
        self.waiting.append(job)

    def schedule(self) -> Plan:
        step, self.num_steps = self.num_steps, self.num_steps + 1
        preempted: list[RequestId] = []
        rows = self._admit() or self._decode(preempted)
        planned = tuple(self._row(job) for job in rows)
        for job in rows:
            job.num_planned, job.num_pending = job.num_known, job.num_pending + 1
        self.flights[step] = rows
        return Plan(step, planned, tuple(preempted))

    def _row(self, job: Job) -> Row:
        count = job.num_known - job.num_planned
        return Row(job.id, job.num_planned, count, tuple(job.table))

    def _admit(self) -> list[Job]:
        rows: list[Job] = []
        budget = self.world.max_num_batched_tokens
        while self.waiting and len(self.running) < self.world.max_num_seqs:
            job = self.waiting[0]
            needed = -(-job.num_known // self.world.block_size)
            if job.num_pending or job.num_known > budget or needed > len(self.free):
                break
            budget -= job.num_known
            job.table = [self.free.pop(0) for _ in range(needed)]
            self.running.append(self.waiting.pop(0))
            rows.append(job)
        return rows

    def _decode(self, preempted: list[RequestId]) -> list[Job]:
        rows: list[Job] = []
        for job in tuple(self.running):
            if job not in self.running or job.aborted or job.num_known >= job.end:
                continue  # its last token is in flight
            if job.num_planned == len(job.table) * self.world.block_size:
                if not self.free and not self._make_room(job, rows, preempted):
                    continue
                job.table.append(self.free.pop(0))
            rows.append(job)
        return rows

    def _make_room(self, job: Job, rows: list[Job], preempted: list[RequestId]) -> bool:
        victims = [j for j in self.running if not j.num_pending and j not in rows and j is not job]
        if not victims or victims[-1].id < job.id:
            return False
        victim = victims[-1]
        self._release(victim)
        victim.num_planned = 0
        self.waiting.insert(0, victim)
        preempted.append(victim.id)
        return True

    def _release(self, job: Job) -> None:
        self.running.remove(job)
        self.free += job.table
        job.table = []

    def commit(self, step: int, tokens: Mapping[RequestId, int]) -> list[Finished]:
        ended: list[Finished] = []
        for job in self.flights.pop(step):
            job.num_pending -= 1
            if job.done:
                self.num_discarded += 1
                continue
            reason = "abort" if job.aborted else self._append(job, tokens[job.id])
            if reason:
                job.done = True
                self._release(job)
                ended.append(Finished(job.id, reason))
        return ended

    def _append(self, job: Job, token: int) -> str | None:
        job.tokens.append(token)
        if token in self.world.eos_token_ids and not job.ignore_eos:
            return "stop"
        return "length" if len(job.tokens) == job.end else None

    def abort(self, request: int) -> bool:
        for job in [*self.waiting, *self.running]:
            if job.id.request == request and not job.aborted:
                job.aborted = True
                if not job.num_pending:
                    job.done = True
                    self._leave(job)
                return True
        return False

    def _leave(self, job: Job) -> None:
        if job in self.running:
            self._release(job)
        else:
            self.waiting.remove(job)

    def pool(self) -> PoolView:
        held = [block for job in self.running for block in job.table]
        return PoolView(tuple(self.free), {block: held.count(block) for block in held})
