"""The state machine: wanders through what may be done next, or does again what was done.

Requests come, steps run, stay in flight or raise, requests are aborted; at the end, what is left
is run until everything has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from nanovllm.conformance.operations import Abort, Add, Commit, FailStep, Operation, Schedule
from nanovllm.conformance.session import Session
from nanovllm.conformance.strategies import draw_request

MAX_REQUESTS = 12


def wander(session: Session, rng: Random) -> None:
    """A story of 4 to 30 moves; raises what the session raises."""
    session.start()
    # Some stories are busy, others leave time between arrivals.
    moves = ("add", "steps") if rng.random() < 0.5 else ("add", "add", "steps")
    rare = ["schedule", "commit"]
    rare += [name for name in ("fail_step", "abort") if name in session.hello.capabilities]
    for _ in range(rng.randint(4, 30)):
        _move(session, rng, rng.choice(moves if rng.random() < 0.8 else rare))
    session.drain()


def _move(session: Session, rng: Random, move: str) -> None:
    match move:
        case "add" if session.num_requests < MAX_REQUESTS:
            session.add(draw_request(rng, session))
        case "steps":
            _steps(session, rng)
        case "schedule" if session.may_schedule:
            session.schedule()
        case "commit" if session.book.flights:
            session.commit()
        case "fail_step":
            if not session.book.flights:
                session.schedule()
            if session.book.flights:
                session.fail_step()
        case "abort":
            live = sorted({id.request for id in session.book.live})
            anyone = not live or rng.random() < 0.25
            session.abort(rng.randint(0, session.num_requests) if anyone else rng.choice(live))


def _steps(session: Session, rng: Random) -> None:
    ahead = session.hello.ahead and rng.random() < 0.5
    for _ in range(rng.randint(1, 4) if session.book.live else 1):
        if not ahead:
            session.step()
            continue
        if session.may_schedule:
            session.schedule()
        if len(session.book.flights) > session.hello.ahead:
            session.commit()


def perform(session: Session, operations: Iterable[Operation]) -> None:
    """Do these again and then run what is left; what cannot be done now is left out."""
    session.start()
    for operation in operations:
        if not set(_needs(operation)) <= session.hello.capabilities:
            continue
        match operation:
            case Add():
                session.add(operation.again())
            case Schedule() if session.may_schedule:
                session.schedule()
            case Commit() if session.book.flights:
                session.commit()
            case FailStep() if session.book.flights:
                session.fail_step()
            case Abort():
                session.abort(operation.request)
    session.drain()


def _needs(operation: Operation) -> Iterator[str]:
    """Capabilities without which an engine cannot be asked this."""
    match operation:
        case FailStep():
            yield "fail_step"
        case Abort():
            yield "abort"
        case Add(options=options):
            asked = {
                "n": options.n > 1,
                "salt": options.salt is not None,
                "stop": bool(options.stop_token_ids),
                "min_tokens": options.min_tokens > 0,
            }
            yield from (name for name, is_asked in asked.items() if is_asked)
