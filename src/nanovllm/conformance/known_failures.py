"""Failures that are known: a TOML file in the engine's own repository, keyed by requirement.

    ["PFX-9"]
    reason = "evicts the newest block first"
    url = "https://example.org/issues/1"
    kind = "bug"
    until = 2030-01-01
    trace = '''{"operations": [...], "world": {...}}'''

`reason` and `kind` are required. An entry excuses its requirement until the day `until`. Its trace
is replayed first, so that a known failure cannot flake; an entry that passes, or that matches
nothing that was tested, is an error: the file must say what is true today.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from nanovllm.conformance.files import write_atomically
from nanovllm.conformance.verdicts import Outcome, Verdict

Kind = Literal["bug", "limitation", "policy"]
_FIELDS = {"reason", "url", "kind", "until", "trace"}

Replay = Callable[[dict[str, Any], str], Verdict]
"""`(trace, requirement)` to what the requirement's check says of that trace now."""


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """One entry.

    Attributes:
        kind: `bug`, `limitation` (will stay), or `policy` (on purpose).
        until: from this day on it excuses nothing; None for always.
        trace: the story that shows it.
    """

    spec_id: str
    reason: str
    kind: Kind = "bug"
    url: str = ""
    until: date | None = None
    trace: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError(f"known failure {self.spec_id}: needs a reason")
        if self.kind not in get_args(Kind):
            allowed = ", ".join(get_args(Kind))
            raise ValueError(
                f"known failure {self.spec_id}: kind {self.kind!r} is none of {allowed}"
            )
        if self.until is not None and type(self.until) is not date:
            raise ValueError(
                f"known failure {self.spec_id}: until {self.until!r} is no date such as 2030-01-01"
            )

    @classmethod
    def from_toml(cls, spec_id: str, entry: Any) -> KnownFailure:
        if not isinstance(entry, dict):
            raise ValueError(f'known failure {spec_id}: must be a table ["{spec_id}"]')
        if unknown := entry.keys() - _FIELDS:
            raise ValueError(f"known failure {spec_id}: unknown {', '.join(sorted(unknown))}")
        values = {"reason": "", **entry}
        if "trace" in values:
            try:
                values["trace"] = json.loads(values["trace"])
            except (TypeError, json.JSONDecodeError) as error:
                raise ValueError(f"known failure {spec_id}: trace is not JSON: {error}") from error
        return cls(spec_id, **values)

    def to_toml(self) -> str:
        lines = [f'["{self.spec_id}"]', f"reason = {_string(self.reason)}"]
        if self.url:
            lines.append(f"url = {_string(self.url)}")
        lines.append(f"kind = {_string(self.kind)}")
        if self.until:
            lines.append(f"until = {self.until.isoformat()}")
        if self.trace is not None:
            lines.append(f"trace = {_literal(json.dumps(self.trace))}")
        return "\n".join(lines)


def load_known_failures(path: Path, known_ids: Iterable[str]) -> dict[str, KnownFailure]:
    """Read the file.

    Raises:
        ValueError: it is not TOML, an entry is malformed or names no requirement of the spec.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    if strangers := [spec_id for spec_id in entries if spec_id not in set(known_ids)]:
        raise ValueError(f"{path}: no requirement is called {', '.join(strangers)}")
    return {spec_id: KnownFailure.from_toml(spec_id, entry) for spec_id, entry in entries.items()}


def replay_known(
    known: Mapping[str, KnownFailure], selected: Iterable[str], replay: Replay
) -> dict[str, Verdict]:
    """What the traces of the selected entries show now; done before anything else is run."""
    return {
        spec_id: replay(entry.trace, spec_id)
        for spec_id in selected
        if (entry := known.get(spec_id)) and entry.trace is not None
    }


def apply_known(
    known: Mapping[str, KnownFailure],
    verdicts: Mapping[str, Verdict],
    replayed: Mapping[str, Verdict],
    today: date,
) -> dict[str, Verdict]:
    """The verdicts of a run, with what is known excused and what is stale accused."""
    return {
        spec_id: _with_known(known[spec_id], verdict, replayed.get(spec_id), today)
        if spec_id in known
        else verdict
        for spec_id, verdict in verdicts.items()
    }


def _with_known(
    entry: KnownFailure, verdict: Verdict, replayed: Verdict | None, today: date
) -> Verdict:
    if verdict.outcome is Outcome.ERROR or (replayed and replayed.outcome is Outcome.ERROR):
        return verdict if verdict.outcome is Outcome.ERROR else replayed or verdict
    if replayed and replayed.outcome is not Outcome.FAIL:
        return _stale(verdict, "its trace in the known failures does not fail any more")
    seen = replayed or verdict
    if seen.outcome is Outcome.PASS:
        return _stale(verdict, "is in the known failures, and passes")
    if seen.outcome is not Outcome.FAIL:
        return _stale(verdict, f"is in the known failures, and is {seen.outcome}")
    evaluations = max(verdict.evaluations, seen.evaluations)
    if entry.until and today >= entry.until:
        message = f"{seen.message} (a known failure only until {entry.until})"
        return replace(seen, evaluations=evaluations, message=message)
    # As it was written first, the reason is what was seen.
    reason = f": {entry.reason}" if entry.reason != seen.message else ""
    url = f" ({entry.url})" if entry.url else ""
    message = f"{seen.message}; {entry.kind}{reason}{url}"
    return replace(seen, outcome=Outcome.KNOWN_FAIL, evaluations=evaluations, message=message)


def _stale(verdict: Verdict, why: str) -> Verdict:
    seen = f"; now: {verdict.message}" if verdict.outcome is Outcome.FAIL else ""
    return replace(verdict, outcome=Outcome.UNEXPECTED_PASS, message=f"{why}{seen}")


def write_known_failures(
    path: Path, verdicts: Iterable[Verdict], known: Mapping[str, KnownFailure]
) -> None:
    """Write what fails as known failures.

    Entries of `known` keep what a person wrote in them; those that were not tested now stay.
    """
    entries = dict(known)
    for verdict in verdicts:
        entry = entries.pop(verdict.spec_id, None) or _new_entry(verdict)
        if verdict.outcome in (Outcome.FAIL, Outcome.KNOWN_FAIL):
            entries[verdict.spec_id] = replace(entry, trace=verdict.trace or entry.trace)
    write_atomically(path, "\n\n".join(entry.to_toml() for entry in entries.values()) + "\n")


def _new_entry(verdict: Verdict) -> KnownFailure:
    return KnownFailure(verdict.spec_id, verdict.message or "fails")


def _string(text: str) -> str:
    """A basic string of TOML, which JSON's escapes are but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _literal(text: str) -> str:
    """Without escapes if it can be, so that a trace reads well."""
    return _string(text) if "'''" in text or text.endswith("'") else f"'''{text}'''"
