"""Which request is at which replica, and what becomes of it when that one is lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from nanovllm.data_parallel.replica import Task, merge
from nanovllm.data_parallel.router import Router
from nanovllm.engine.interrupts import interrupts_held
from nanovllm.outputs import RequestOutput, SampleOutput, StepOutput

MAX_LOSSES: Final = 1
"""Replicas that a request may lose and still be tried again: it might be what kills them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """In place of an answer: the replica has ended, or can compute no more."""

    cause: str


class Pool(Protocol):
    """The replicas, wherever they are; each does one thing at a time, in order of the calls."""

    def begin(self, replica: int, tasks: list[Task], aborted: list[int]) -> None:
        """Have it `work`."""

    def wait(self) -> None:
        """Wait until one that works has an answer."""

    def answers(self) -> list[tuple[int, StepOutput | Lost]]:
        """Those that are there, each given once."""

    def ask(self, replica: int, method: str) -> Any | Lost:
        """Call another method, and wait for its answer."""

    def end(self, replica: int) -> None:
        """End it, whatever it does; no answer of it comes any more."""

    def close(self) -> None:
        """End all."""


@dataclass(slots=True)
class _Live:
    """A request that has not ended; `cost` is the most work that it can be."""

    task: Task
    cost: int
    replica: int = -1
    aborted: bool = False
    losses: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Mail:
    """What a replica is to be told next."""

    tasks: list[Task] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)


class Dispatcher:
    """Sends requests to replicas and takes their answers; not thread-safe.

    `losses` has the cause of the end of each replica that was lost.
    """

    def __init__(self, pool: Pool, router: Router) -> None:
        self.pool = pool
        self.router = router
        self.losses: dict[int, str] = {}
        self._mail = {replica: _Mail() for replica in router.replicas}
        self._working: set[int] = set()
        self._live: dict[int, _Live] = {}
        self._ended: list[RequestOutput] = []  # not handed over yet

    @property
    def is_dead(self) -> bool:
        """Whether no replica is left."""
        return not self._mail

    @property
    def is_finished(self) -> bool:
        """Whether `advance` has nothing to do and nothing to hand over."""
        return not self._live and not self._ended

    @property
    def num_undelivered(self) -> int:
        """Samples that no engine knows of yet."""
        return sum(task.params.n for mail in self._mail.values() for task in mail.tasks)

    def add(self, task: Task, cost: int) -> None:
        """Choose a replica for a request, and send it there with the next `advance`."""
        self._live[task.request_id] = live = _Live(task, cost)
        if self.is_dead:
            self._end(live, "error", "no replica is left")
        else:
            self._send(live)

    def _send(self, live: _Live) -> None:
        task = live.task
        live.replica = self.router.route(task.token_ids, live.cost, task.cache_salt)
        self._mail[live.replica].tasks.append(task)

    def abort(self, request_id: int) -> bool:
        """Have a request ended, which takes an `advance` or two; False if it is not there."""
        live = self._live.get(request_id)
        if live is None:
            return False
        if not live.aborted:
            live.aborted = True
            self._mail[live.replica].aborted.append(request_id)
        return True

    def advance(self) -> StepOutput:
        """Set every replica to work that has any, and wait for the first to report."""
        steps: list[StepOutput] = []
        with interrupts_held():
            self._set_to_work()
        if self._working:
            self.pool.wait()
            with interrupts_held():
                for replica, answer in self.pool.answers():
                    self._working.discard(replica)
                    if isinstance(answer, Lost):
                        self._lose(replica, answer.cause)
                    else:
                        self._take(replica, answer)
                        steps.append(answer)
        told = replace(merge(steps), outputs=tuple(self._ended))
        self._ended = []
        return told

    def _set_to_work(self) -> None:
        for replica, mail in self._mail.items():
            if replica not in self._working and self.router.load(replica):
                self.pool.begin(replica, mail.tasks, mail.aborted)
                self._mail[replica] = _Mail()
                self._working.add(replica)

    def _take(self, replica: int, step: StepOutput) -> None:
        for output in step.outputs:
            self.router.release(replica, self._live.pop(output.request_id).cost)
        self._ended += step.outputs

    def ask_all(self, method: str) -> dict[int, Any]:
        """Answers of the replicas that are left, by replica."""
        answers = {replica: self.pool.ask(replica, method) for replica in self.router.replicas}
        for replica, answer in answers.items():
            if isinstance(answer, Lost):
                self._lose(replica, answer.cause)
        return {r: answer for r, answer in answers.items() if not isinstance(answer, Lost)}

    # ---- losses ----------------------------------------------------------------------------

    def _lose(self, replica: int, cause: str) -> None:
        """Go on without a replica: its requests begin anew elsewhere, or end."""
        self.losses[replica] = cause
        self.pool.end(replica)
        self.router.lose(replica)
        self._working.discard(replica)
        del self._mail[replica]
        stranded = [live for live in self._live.values() if live.replica == replica]
        num_retried = sum(self._rescue(live, f"replica {replica}: {cause}") for live in stranded)
        logger.warning(
            "replica %d is lost (%s); of its %d requests %d are tried elsewhere; replicas left: %d",
            *(replica, cause, len(stranded), num_retried, len(self._mail)),
        )

    def _rescue(self, live: _Live, loss: str) -> bool:
        """Whether a request whose replica is lost gets another one; if not, it has ended."""
        live.losses.append(loss)
        if live.aborted:
            self._end(live, "abort", None)
        elif len(live.losses) > MAX_LOSSES or self.is_dead:
            self._end(live, "error", "lost with its replica; " + "; ".join(live.losses))
        else:
            self._send(live)
            return True
        return False

    def _end(self, live: _Live, reason: str, error: str | None) -> None:
        task = self._live.pop(live.task.request_id).task
        sample = SampleOutput("", [], reason, error, None if task.params.logprobs is None else [])
        self._ended.append(
            RequestOutput(
                task.request_id, task.prompt, task.token_ids, 0, (sample,) * task.params.n
            )
        )
