"""A run of the suite on one engine: opens the door, lets each part judge, makes the report."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from nanovllm.conformance.codec import ProtocolError
from nanovllm.conformance.judge import block, complete, merge
from nanovllm.conformance.known_failures import (
    KnownFailure,
    apply_known,
    load_known_failures,
    replay_known,
    write_known_failures,
)
from nanovllm.conformance.options import RunOptions
from nanovllm.conformance.protocol import (
    CORE_CAPABILITIES,
    ENGINE_CAPABILITIES,
    EngineFault,
    Hello,
    Refused,
    Unsupported,
    World,
)
from nanovllm.conformance.registry import Requirement, list_requirements, load_spec
from nanovllm.conformance.report import Report, write_reports
from nanovllm.conformance.trace_files import load_trace, save_trace
from nanovllm.conformance.transport import OpenDoor, open_door
from nanovllm.conformance.verdicts import Outcome, Verdict


class NotTestable(Exception):  # noqa: N818
    """The engine cannot be asked anything; the message says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a part of the suite is given: an engine and what to judge about it.

    Attributes:
        tell: shown to the person who waits: what is being done.
    """

    door: OpenDoor
    hello: Hello
    selected: Mapping[str, Requirement]
    options: RunOptions
    tell: Callable[[str], None]

    @property
    def doors(self) -> tuple[str, ...]:
        """Doors that the engine has and that are to be tested."""
        wanted = self.options.door or self.hello.doors
        return tuple(door for door in self.hello.doors if door in wanted)


@dataclass(slots=True)
class Findings:
    """What the parts have found so far."""

    verdicts: list[Verdict] = field(default_factory=list)
    remarks: list[Verdict] = field(default_factory=list)


class Part(Protocol):
    """A source of verdicts: corpus, scenarios, state machine."""

    @property
    def name(self) -> str: ...

    def judge(self, subject: Subject, findings: Findings) -> None:
        """Add what is found; a defect of the engine is a verdict, never an exception."""
        ...


class Replayer(Protocol):
    """Runs a trace again."""

    def __call__(self, subject: Subject, trace: Mapping[str, Any]) -> list[Verdict]:
        """A verdict for each selected requirement that the trace puts to the test."""
        ...


def select(options: RunOptions, engine_doors: Sequence[str]) -> dict[str, Requirement]:
    """What a run judges: ids, levels and doors that are asked for; by default the engine's doors.

    Raises:
        ValueError: that is nothing, so that a slip in an id is not a pass.
    """
    doors = options.door or engine_doors
    chosen = list_requirements(pattern=options.pattern, levels=options.levels, doors=doors)
    if not chosen:
        raise ValueError(
            f"no requirement is {options.pattern} at level {options.level} of door"
            f" {', '.join(doors)}; see `nanovllm conformance list`"
        )
    return {requirement.id: requirement for requirement in chosen}


class SuiteRun:
    """One run.

    Args:
        tell: see `Subject`.
        parts: in the order in which they run.
        open: makes the door; another one than `transport.open_door` for an engine in this process.

    Raises:
        NotTestable: see there; reports on disk then say that they are not complete.
        ValueError: an option or a known failure is wrong.
    """

    def __init__(
        self,
        options: RunOptions,
        parts: Sequence[Part],
        replay: Replayer,
        *,
        tell: Callable[[str], None] = lambda message: None,
        open: Callable[[RunOptions], OpenDoor] | None = None,
    ) -> None:
        self.options = options.with_seed()
        self.parts = parts
        self.replay = replay
        self.tell = tell
        self.open = open or open_engine
        self.spec = load_spec()
        self.known: dict[str, KnownFailure] = {}
        self.findings = Findings()
        self.replayed: dict[str, Verdict] = {}
        self.began = time.monotonic()

    def run(self) -> Report:
        """Judge, write what is to be written, and return the report."""
        if self.options.known_failures:
            self.known = load_known_failures(self.options.known_failures, self.spec.requirements)
        write_reports(
            Report(self.spec, {}, {"name": self.options.engine, "version": ""}, complete=False),
            self.options.report,
        )
        with self.open(self.options) as door:
            subject = self._subject(door)
            if self.options.replay:
                self._replay_only(subject, self.options.replay)
            else:
                self._run_parts(subject)
        report = self._report(subject, done=True)
        write_reports(report, self.options.report)
        return report

    def _subject(self, door: OpenDoor) -> Subject:
        self.tell(f"starting {self.options.engine}")
        try:
            hello = _started(door)
        except (EngineFault, ProtocolError, OSError) as error:
            raise NotTestable(f"{self.options.engine} does not start: {error}") from error
        selected = select(self.options, hello.doors)
        return Subject(door, hello, selected, self.options, self.tell)

    def _run_parts(self, subject: Subject) -> None:
        def replay_one(trace: Mapping[str, Any], spec_id: str) -> Verdict:
            found = merge(self.replay(subject, trace))
            return found.get(spec_id, Verdict(spec_id, Outcome.NOT_EXERCISED))

        if self.known:
            self.tell("known failures")
            self.replayed = replay_known(self.known, subject.selected, replay_one)
        for part in self.parts:
            self.tell(part.name)
            try:
                part.judge(subject, self.findings)
            except Exception:
                self.findings.verdicts += _errors(part, subject)
            write_reports(self._report(subject, done=False), self.options.report)

    def _replay_only(self, subject: Subject, path: Path) -> None:
        self.tell(f"replaying {path}")
        self.findings.verdicts += self.replay(subject, load_trace(path))

    def _report(self, subject: Subject, *, done: bool) -> Report:
        selected = subject.selected
        found = merge(v for v in self.findings.verdicts if v.spec_id in selected)
        if self.options.replay:
            # Nothing else was to be judged, so nothing else was missed.
            selected = {i: r for i, r in selected.items() if i in found or self.options.req}
        verdicts = complete(selected, found, subject.hello)
        verdicts = apply_known(self.known, verdicts, self.replayed, date.today())
        if done and self.options.known_failures_write:
            written = self.options.known_failures_write
            write_known_failures(written, verdicts.values(), self.known)
        verdicts = block(self.spec.requirements, verdicts)
        return Report(
            self.spec,
            verdicts,
            engine=engine_facts(self.options, subject.hello),
            capabilities=declared(subject.hello),
            settings=self._settings(subject),
            commands=self._commands(verdicts.values()) if done else {},
            remarks=self._remarks(verdicts),
            complete=done,
            seconds=time.monotonic() - self.began,
        )

    def _remarks(self, verdicts: Mapping[str, Verdict]) -> tuple[Verdict, ...]:
        """On requirements that were selected; where one fails anyway, that says enough."""
        fine = {i for i, verdict in verdicts.items() if verdict.outcome is not Outcome.FAIL}
        return tuple(remark for remark in self.findings.remarks if remark.spec_id in fine)

    def _settings(self, subject: Subject) -> dict[str, Any]:
        options = self.options
        if options.replay:
            return {"replay": str(options.replay)}
        doors = " ".join(subject.doors)
        return {
            "doors": doors,
            "level": options.level,
            "profile": options.profile,
            "seed": options.seed,
        }

    def _commands(self, verdicts: Iterable[Verdict]) -> dict[str, str]:
        """How to see each failure again; its trace is kept for that."""
        commands: dict[str, str] = {}
        for verdict in verdicts:
            if verdict.outcome not in (Outcome.FAIL, Outcome.ERROR, Outcome.KNOWN_FAIL):
                continue
            if verdict.trace is None:
                commands[verdict.spec_id] = self.options.rerun(verdict.spec_id)
            else:
                path = self.options.replay or save_trace(verdict)
                commands[verdict.spec_id] = self.options.command(
                    "--req", verdict.spec_id, "--replay", str(path)
                )
        return commands


def _started(door: OpenDoor) -> Hello:
    """Who answers. An engine that cannot even be made says nothing about any requirement."""
    hello = door.hello()
    if not {"blocks", "core"}.isdisjoint(hello.doors):
        with suppress(Refused, Unsupported):
            door.reset(World(block_size=4, num_blocks=16))
    return hello


def _errors(part: Part, subject: Subject) -> list[Verdict]:
    """The part itself is at fault: whatever it was to judge is in doubt."""
    message = f"{part.name}: {traceback.format_exc()}"
    return [Verdict(spec_id, Outcome.ERROR, message=message) for spec_id in subject.selected]


def open_engine(options: RunOptions) -> OpenDoor:
    """The engine's door; the reference runs in this process unless it has another interpreter."""
    # Tiny tensors gain nothing from threads, and on a busy machine threads that wait for each other
    # cost minutes. Torch reads this when it is first imported, here or in the engine's process.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    here = options.engine == "reference" and not (options.engine_path or options.engine_python)
    return open_door(
        options.engine,
        path=options.engine_path,
        python=str(options.engine_python) if options.engine_python else None,
        options=options.engine_options(),
        transport="in-process" if here else "subprocess",
    )


def engine_facts(options: RunOptions, hello: Hello) -> dict[str, Any]:
    return {
        "name": hello.engine,
        "version": hello.version,
        "spec": options.engine,
        "path": str(options.engine_path) if options.engine_path else None,
        "options": options.engine_options(),
        "doors": list(hello.doors),
        "ahead": hello.ahead,
    }


def declared(hello: Hello) -> dict[str, bool]:
    """All capabilities that its doors can have, and whether it has them."""
    possible = {"core": CORE_CAPABILITIES, "engine": ENGINE_CAPABILITIES}
    names = {name for door in hello.doors for name in possible.get(door, ())}
    return {name: name in hello.capabilities for name in sorted(names)}
