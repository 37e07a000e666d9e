"""Judges an engine that only logs: no adapter, any language, also while it is in production.

A log has one JSON object a line. The first says who speaks and within which limits, the others what
the engine was asked and what it answered, in the order in which it happened:

    {"hello": {"engine": "mine", "version": "1.0", "doors": ["core"],
     "capabilities": ["prefix_cache", "chunked_prefill"], "ahead": 0},
     "world": {"block_size": 16, "num_blocks": 512, "max_num_seqs": 64,
     "max_num_batched_tokens": 2048, "max_model_len": 4096, "eos_token_ids": [2]}}
    {"op": "add", "request": 0, "prompt": [5, 6, 7], "max_tokens": 4}
    {"op": "schedule", "plan": {"step": 0, "rows": [{"id": [0, 0], "start": 0, "count": 3,
     "block_table": [9]}]}}
    {"op": "commit", "step": 0, "tokens": [[[0, 0], 8]], "finished": []}

`operations.py` describes every operation and `protocol.py` every field. What the shadow KV needs is
all there: which positions are computed through which blocks, and the tokens. A plan is executed at
its commit. `fail_step` says that a plan raised; those after it go on, without the requests that it
has ended. `open_end` of a request says that it may also end by a stop string; a row of a plan that
has no token although it reaches the last known one must have ended with reason `error`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from nanovllm.conformance.codec import ProtocolError, decode
from nanovllm.conformance.entries import Unreadable, name_of
from nanovllm.conformance.examination import Example, examine
from nanovllm.conformance.operations import (
    Abort,
    Add,
    Commit,
    FailStep,
    Operation,
    ResetPrefixCache,
    Schedule,
    from_json,
)
from nanovllm.conformance.protocol import (
    CacheStats,
    Finished,
    Hello,
    Plan,
    PoolView,
    Refused,
    RequestId,
    RequestOptions,
    Unsupported,
    World,
)
from nanovllm.conformance.session import Session
from nanovllm.conformance.trace import tell_world
from nanovllm.conformance.verdicts import Outcome, Verdict

UNSEEN = frozenset({"hash", "hash_override", "pool", "stats", "wire"})
"""Capabilities of which a log shows nothing."""

STORY_LINES = 12


class LoggedEngine:
    """A core door that answers what was logged."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self.operation: Operation = Schedule()

    def hello(self) -> Hello:
        return self._hello

    def reset(self, world: World) -> None:
        """A log begins with an engine that has done nothing."""

    def add(
        self, request: int, prompt: Sequence[int], max_tokens: int, options: RequestOptions
    ) -> None:
        assert isinstance(self.operation, Add)
        if self.operation.refused is not None:
            raise Refused(self.operation.refused)

    def schedule(self) -> Plan:
        assert isinstance(self.operation, Schedule)
        return self.operation.plan

    def commit(self, step: int, tokens: Mapping[RequestId, int]) -> list[Finished]:
        assert isinstance(self.operation, Commit)
        return list(self.operation.finished)

    def abort(self, request: int) -> bool:
        assert isinstance(self.operation, Abort)
        return self.operation.took

    def fail_step(self, step: int) -> list[Finished]:
        assert isinstance(self.operation, FailStep)
        return list(self.operation.finished)

    def pool(self) -> PoolView:
        _unseen()

    def hash(self, token_ids: Sequence[int], parent: str | None) -> str:
        _unseen()

    def wire(self, id: RequestId) -> int:
        _unseen()

    def stats(self) -> CacheStats:
        _unseen()


def _unseen() -> NoReturn:
    raise Unsupported("a log does not show it")


def check_log(lines: Iterable[str], select: Collection[str] | None = None) -> list[Verdict]:
    """A verdict for each selected requirement (all if None) that the log puts to the test.

    Raises:
        ValueError: it is no log; names the line and what is wrong with it.
    """
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError("the log is empty")
    hello, world = _read_head(*numbered[0])
    operations = [_read_operation(i, line) for i, line in numbered[1:]]
    engine = LoggedEngine(hello)
    example = Example(world, lambda session: _follow(session, engine, operations), logged=True)
    result = examine(engine, hello, [example], select)
    verdicts = []
    for spec_id in sorted({*result.counts, *result.failures, *result.errors}):
        count = result.counts[spec_id]
        if spec_id in result.failures:
            session, violation = result.failures[spec_id]
            line = numbered[len(session.operations)][0]
            message = f"line {line}: {violation.message}"
            verdicts.append(Verdict(spec_id, Outcome.FAIL, count, message, _story(session)))
        elif spec_id in result.errors:
            verdicts.append(Verdict(spec_id, Outcome.ERROR, message=result.errors[spec_id]))
        else:
            verdicts.append(Verdict(spec_id, Outcome.PASS, count))
    return verdicts


def _read_head(number: int, line: str) -> tuple[Hello, World]:
    try:
        head = json.loads(line)
        hello: Hello = decode(Hello, head["hello"], "hello")
        world: World = decode(World, head["world"], "world")
    except (ValueError, KeyError, TypeError, ProtocolError) as error:
        raise ValueError(f"line {number}: expected hello and world: {error}") from error
    seen = hello.capabilities - UNSEEN
    return Hello(hello.engine, hello.version, ("core",), seen, hello.ahead, hello.protocol), world


def _read_operation(number: int, line: str) -> Operation:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, got {value!r:.80}")
        return from_json(value)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _follow(session: Session, engine: LoggedEngine, operations: Iterable[Operation]) -> None:
    session.start()
    for operation in operations:
        engine.operation = operation
        match operation:
            case Add():
                session.add(operation)
            case Schedule():
                session.schedule()
            case Commit():
                _require_plan(session, operation)
                _require_tokens(session, operation)
                session.commit(operation.tokens)
            case Abort():
                session.abort(operation.request)
            case FailStep():
                _require_plan(session, operation)
                _require_ends(session, operation)
                session.fail_step()
            case ResetPrefixCache():
                session.forget_prefixes()


def _require_ends(session: Session, operation: FailStep) -> None:
    """Nobody goes on who has a row in the plan that failed, and one in a plan behind it."""
    failed, *others = session.book.flights
    ended = {finished.id for finished in operation.finished}
    alive = {seating.entry.id for seating in failed.seatings} - ended
    for seating in (seating for flight in others for seating in flight.seatings):
        if seating.entry.id in alive:
            line, who = len(session.operations) + 2, name_of(seating.entry.id)
            raise Unreadable(
                f"line {line}: {who} goes on after step {operation.step}, with a row in flight"
            )


def _require_plan(session: Session, operation: Commit | FailStep) -> None:
    oldest = session.book.flights[0].plan.step if session.book.flights else None
    if oldest != operation.step:
        line = len(session.operations) + 2
        raise Unreadable(f"line {line}: step {operation.step} ends; in flight is {oldest}")


def _require_tokens(session: Session, operation: Commit) -> None:
    told = {finished.id: finished.reason for finished in operation.finished}
    for seating in session.book.flights[0].seatings:
        entry = seating.entry
        idle = entry.reason is not None or entry.aborting or told.get(entry.id) == "error"
        if seating.samples and not idle and entry.id not in operation.tokens:
            line = len(session.operations) + 2
            raise Unreadable(f"line {line}: no token for {name_of(entry.id)}")


def _story(session: Session) -> tuple[str, ...]:
    """The last operations; the log has the others."""
    lines = [str(operation) for operation in session.operations]
    if len(lines) > STORY_LINES:
        lines = [f"({len(lines) - STORY_LINES} operations before)", *lines[-STORY_LINES:]]
    return (tell_world(session.world), *lines)
