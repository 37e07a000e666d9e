"""Rank 0's hold on the others: it tells them what to do, and learns when one is lost.

A lost rank is fatal: its part of the weights and of the KV cache is gone, and the others wait for
it in a collective. A thread listens to all of them. At a report of failure, or the end of a process
that made none, it writes down the cause, ends the other processes, and aborts the group. That
breaks the collective that rank 0 may be in: gloo's sockets close with the processes, NCCL's kernels
see the abort.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from nanovllm.engine.interrupts import interrupts_held
from nanovllm.engine.model_runner import RankInfo
from nanovllm.engine.tensor_parallel.channel import hang_up, receive, send_all
from nanovllm.engine.tensor_parallel.group import RankGroup

CAUSE_TIMEOUT = 2.0
"""Seconds between a broken collective and the news of who broke it, which usually come first."""

SILENT_TIMEOUT = 0.5
"""Seconds after a report of failure in which another rank may turn out to have been killed: then
the report is about that one's loss."""

END_TIMEOUT = 5.0
"""Seconds that a process may take to end when told to, or when killed."""

logger = logging.getLogger(__name__)


class RankError(RuntimeError):
    """A rank was lost, and with it the engine."""


@dataclass(frozen=True, slots=True)
class Joined:
    """News: this rank runs, and goes on to join the group."""


@dataclass(frozen=True, slots=True)
class Failure:
    """News: this rank ends."""

    cause: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Member:
    """Another rank; `process` is None if it was not spawned here."""

    rank: int
    channel: Connection
    process: BaseProcess | None


class Ranks:
    """All ranks but 0. Every method is rank 0's; `fault` says why the engine has to end."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.fault: str | None = None
        self.group: RankGroup | None = None
        self.infos: dict[int, RankInfo] = {}
        self._members = {member.channel: member for member in members}
        self._joined: set[int] = set()
        self._closing = False
        self._news = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-ranks", daemon=True)
        self._watcher.start()

    # ---- news from the ranks ---------------------------------------------------------------

    def _watch(self) -> None:
        listening = dict(self._members)
        reports: dict[int, Failure] = {}
        while listening and self.fault is None:
            ready = wait(list(listening), SILENT_TIMEOUT if reports else None)
            for channel in ready:
                assert isinstance(channel, Connection)
                member, news = listening[channel], next_news(channel)
                if isinstance(news, Failure):
                    reports[member.rank] = news
                elif news is not None:
                    self._note(member.rank, news)
                else:
                    del listening[channel]
                    if member.rank not in reports and not self._closing:
                        self._give_up(how_it_ended(member))
            if not ready:
                break
        if reports and self.fault is None:
            rank, report = next(iter(reports.items()))
            logger.error("rank %d failed:\n%s", rank, report.traceback)
            self._give_up(f"rank {rank}: {report.cause}")

    def _note(self, rank: int, news: Joined | RankInfo) -> None:
        with self._news:
            if isinstance(news, RankInfo):
                self.infos[rank] = news
            else:
                self._joined.add(rank)
            self._news.notify_all()

    def _give_up(self, cause: str) -> None:
        with self._news:
            if self.fault is not None:
                return
            self.fault = cause
            self._news.notify_all()
        self._kill()
        if self.group is not None:
            self.group.abort()

    def _kill(self) -> None:
        for member in self._members.values():
            hang_up(member.channel)  # which ends those that were not spawned here
            if member.process is not None:
                member.process.kill()

    def wait_joined(self) -> None:
        """Wait until all ranks run. Raises RankError."""
        self._wait(lambda: len(self._joined) == len(self._members))

    def wait_ready(self) -> None:
        """Wait until all ranks can compute. Raises RankError."""
        self._wait(self._are_ready)

    def _are_ready(self) -> bool:
        return len(self.infos) == len(self._members)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._news:
            self._news.wait_for(lambda: condition() or self.fault is not None)
        self.check()

    # ---- a step ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RankError if no step can run."""
        if self.fault is not None:
            raise RankError(self.fault)

    @contextmanager
    def told(self, method: str, *args: object) -> Iterator[None]:
        """Every other rank's runner is told to call `method`; in the block rank 0 does the same."""
        self.check()
        with interrupts_held(), self.guarded():
            send_all(self._members, (method, args))
            yield

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What raises in the block leaves the ranks at odds, hence is fatal: a RankError."""
        try:
            yield
        except BaseException as error:
            with self._news:
                if isinstance(error, RuntimeError | OSError):
                    self._news.wait_for(lambda: self.fault is not None, CAUSE_TIMEOUT)
            self._give_up(f"rank 0: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            raise RankError(self.fault) from error

    # ---- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """End all ranks; twice is harmless."""
        if self._closing:
            return
        self._closing = True
        if self.fault is None and self._are_ready():
            for channel in self._members:
                with suppress(OSError):  # if it has ended already
                    send_all([channel], None)
        else:
            self._kill()
        for member in self._members.values():
            if member.process is not None:
                end(member.process)
        self._watcher.join(END_TIMEOUT)
        for channel in self._members:
            channel.close()
        if self.group is not None:
            self.group.close()


def next_news(channel: Connection) -> Joined | RankInfo | Failure | None:
    """What a rank tells; None if it has ended."""
    try:
        news: Joined | RankInfo | Failure = receive(channel)
    except (EOFError, OSError):
        return None
    return news


def end(process: BaseProcess) -> None:
    """Wait for a process that was told to end, and kill it if it does not."""
    process.join(END_TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join(END_TIMEOUT)


def how_it_ended(member: Member) -> str:
    """Why a channel has closed."""
    who = f"rank {member.rank}"
    if member.process is None:
        return f"{who} is gone: its connection has closed"
    member.process.join(END_TIMEOUT)
    code = member.process.exitcode
    if code is not None and code < 0:
        return f"{who} was killed by {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code}"
