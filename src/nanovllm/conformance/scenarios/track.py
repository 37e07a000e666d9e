"""What the suite knows of one request at the core door, and the model that draws its tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.conformance.protocol import RequestId, Row, World

ALPHABET = range(100, 1000)
"""Tokens that the model draws; prompts have smaller ones, so that no output equals a prompt."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def digests(tokens: Sequence[int]) -> list[int]:
    """For each position, what its slot holds once computed behind exactly these tokens."""
    found, digest = [], 0
    for token in tokens:
        digest = zlib.crc32(token.to_bytes(8, "little", signed=True), digest)
        found.append(digest)
    return found


def next_token(read: Sequence[int], seed: int) -> int:
    """The model: depends on all that is read; samples differ by `seed`."""
    return ALPHABET[zlib.crc32(repr((seed, *read)).encode()) % len(ALPHABET)]


@dataclass(frozen=True, slots=True)
class Admission:
    """A request got a seat: `known` tokens, of which `resident` leading full blocks were in the
    pool when the plan was asked for, and its first row."""

    known: int
    resident: int
    row: Row

    @property
    def cached(self) -> int:
        return self.row.start


def _short(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:12]))
    return f"[{shown}]" if len(tokens) <= 12 else f"[{shown}, ... {len(tokens)} in all]"


@dataclass(eq=False)
class Track:
    """What the suite knows of one request, or one sample of it."""

    id: RequestId
    prompt: tuple[int, ...]
    max_tokens: int
    forced: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()
    rows: list[Row] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    num_preempted: int = 0
    reason: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def __repr__(self) -> str:
        prompt, completion = map(_short, (self.prompt, self.completion))
        return f"request {self.id.request} ({prompt} + {completion})"

    @property
    def completion(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def is_seated(self) -> bool:
        return bool(self.table)

    @property
    def cached(self) -> int:
        """Tokens that it did not compute at its first admission."""
        return self.admissions[0].cached

    def draw(self, read: Sequence[int]) -> int:
        index = len(read) - len(self.prompt)
        if index < len(self.forced):
            return self.forced[index]
        return next_token(read, self.id.sample)


def small(**changes: Any) -> World:
    """Blocks of 4 tokens, enough of everything else."""
    return World(**{"block_size": 4, "num_blocks": 16, **changes})


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))
