"""`nanovllm conformance doctor`: does an engine answer, and is what it declares what it does?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.conformance.codec import ProtocolError
from nanovllm.conformance.engine_probes import ENGINE_PROBES, probe_generate
from nanovllm.conformance.probes import (
    CORE_PROBES,
    Absent,
    probe_ahead,
    probe_blocks,
    probe_lookup,
    probe_steps,
)
from nanovllm.conformance.protocol import EngineFault, Hello, Refused, Unsupported
from nanovllm.conformance.transport import OpenDoor

EMBEDDED_MODEL = Path(__file__).parents[1] / "assets" / "tiny-qwen3"

FAILURES = (Absent, Refused, Unsupported, EngineFault, ProtocolError)

Probe = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One probe of one door.

    Attributes:
        capability: what was probed; None for what every engine behind the door has.
        declared: whether the engine says that it has it.
        works: whether the probe succeeded; `detail` says why not.
    """

    door: str
    capability: str | None
    declared: bool
    works: bool
    detail: str = ""

    @property
    def is_problem(self) -> bool:
        return self.declared and not self.works

    @property
    def is_hint(self) -> bool:
        """It works and will not be tested, because it is not declared."""
        return self.works and not self.declared

    def __str__(self) -> str:
        what = self.capability or "the calls that every engine has"
        if self.is_problem and self.capability:
            return f"{self.door}: {what}: declared, but {self.detail.splitlines()[0]}"
        if self.is_problem:
            return f"{self.door}: {what}: {self.detail}"
        if self.is_hint:
            return f"{self.door}: {what}: works; declare it to have it tested"
        return f"{self.door}: {what}: {'works' if self.works else 'not declared, not there'}"


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What was found; `hello` is None if the engine did not even answer that."""

    hello: Hello | None
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_problem)

    @property
    def hints(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_hint)

    def lines(self) -> Iterator[str]:
        """The report as text, problems last."""
        if self.hello is not None:
            yield f"{self.hello.engine} {self.hello.version}: {', '.join(self.hello.doors)}"
        yield from map(str, sorted(self.findings, key=lambda f: (f.is_problem, f.is_hint)))


def examine(
    door: OpenDoor, *, model: str | Path = EMBEDDED_MODEL, options: Mapping[str, Any] | None = None
) -> DoctorReport:
    """Probe every door that the engine says it has.

    Args:
        model, options: what `open` is given at the engine door.
    """
    try:
        hello = door.hello()
    except FAILURES as error:
        return DoctorReport(None, (Finding("hello", None, True, False, _tell(error)),))
    findings: list[Finding] = []
    if "blocks" in hello.doors:
        findings += _probe(hello, "blocks", door, probe_blocks, {"prefix_cache": probe_lookup})
    if "core" in hello.doors:
        findings += _probe(hello, "core", door, probe_steps, CORE_PROBES)
        if hello.ahead:
            findings.append(_finding("core", "ahead", True, probe_ahead, door))
    if "engine" in hello.doors:

        def first(door: OpenDoor) -> None:
            door.open(str(model), options or {})
            probe_generate(door)

        findings += _probe(hello, "engine", door, first, ENGINE_PROBES)
    return DoctorReport(hello, tuple(findings))


def _probe(
    hello: Hello, name: str, door: OpenDoor, basic: Probe, probes: Mapping[str, Probe]
) -> Iterator[Finding]:
    """The calls that all have, and if they work whatever else there may be."""
    first = _finding(name, None, True, basic, door)
    yield first
    if first.works:
        for capability, probe in probes.items():
            declared = capability in hello.capabilities
            yield _finding(name, capability, declared, probe, door)


def _finding(
    name: str, capability: str | None, declared: bool, probe: Probe, door: OpenDoor
) -> Finding:
    try:
        probe(door)
    except FAILURES as error:
        return Finding(name, capability, declared, False, _tell(error))
    return Finding(name, capability, declared, True)


def _tell(error: Exception) -> str:
    return str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}"
