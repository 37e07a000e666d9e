"""The shadow KV: every slot holds the token history that was computed there.

A real cache holds vectors that depend on all tokens up to their position; here a slot holds these
tokens themselves, as a node of a tree of histories. So whatever a row reads tells whether it is
this request's own, and a wrong block, a stale hit or a slot read too early shows as tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class History:
    """Tokens from the start of a request up to one position; equal histories are one object.

    `salt` belongs to the history (PFX-14) but not to `digest`: KV depends on tokens and positions
    alone (PFX-13). A root has no token and depth 0.
    """

    __slots__ = ("_next", "depth", "digest", "parent", "salt", "token")

    def __init__(self, parent: History | None, token: int, salt: str | None) -> None:
        self.parent = parent
        self.token = token
        self.salt = salt
        self.depth: int = parent.depth + 1 if parent else 0
        self.digest: int = zlib.crc32(b"%d," % token, parent.digest) if parent else 0
        self._next: dict[int, History] = {}

    @classmethod
    def root(cls, salt: str | None) -> History:
        return cls(None, -1, salt)

    def then(self, token: int) -> History:
        if token not in self._next:
            self._next[token] = History(self, token, self.salt)
        return self._next[token]

    @property
    def tokens(self) -> tuple[int, ...]:
        tokens: list[int] = []
        node: History = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))

    def begins_with(self, other: History) -> bool:
        """Whether `other` is this history or one that it continues."""
        node: History | None = self
        while node is not None and node.depth > other.depth:
            node = node.parent
        return node is other

    def __repr__(self) -> str:
        salt = f" of {self.salt!r}" if self.salt is not None else ""
        return f"{list(self.tokens)}{salt}"


Slots = list[History | None]


@dataclass(frozen=True, slots=True)
class Span:
    """Compute `[start, end)` of `path` through `table`; `path[i]` is the history up to i."""

    path: Sequence[History]
    start: int
    end: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Misread:
    """`position` reads `found` where it should read `wanted`.

    Attributes:
        block: None if the table ends before.
        before: what the slot held before this plan wrote.
    """

    position: int
    block: int | None
    wanted: History
    found: History | None
    before: History | None

    def __str__(self) -> str:
        slot = "no block" if self.block is None else f"block {self.block}"
        found = "nothing that was computed" if self.found is None else repr(self.found)
        return f"position {self.position} reads {found} from {slot} instead of {self.wanted}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one row read; `digest` depends on all of it."""

    misreads: tuple[Misread, ...]
    digest: int


class ShadowKV:
    """What each block holds, slot by slot; None was never computed."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[int, Slots] = {}

    def block(self, block_id: int) -> Slots:
        return self._blocks.setdefault(block_id, [None] * self.block_size)

    def content(self, block_id: int) -> History | None:
        """The history that ends with this block, if it is full of one."""
        slots = self.block(block_id)
        last = slots[-1]
        if last is None or last.depth % self.block_size:
            return None
        node: History | None = last
        for slot in reversed(slots):
            if slot is None or slot is not node:
                return None
            node = node.parent
        return last

    def execute(
        self, copies: Iterable[tuple[int, int]], spans: Sequence[Span]
    ) -> tuple[Reading, ...]:
        """Copies, then all writes, then all reads, since rows of one step may share blocks."""
        for source, target in copies:
            self._blocks[target] = list(self.block(source))
        named = {block_id for span in spans for block_id in span.table}
        before = {block_id: list(self.block(block_id)) for block_id in named}
        for span in spans:
            for block_id, offset, i in self._slots(span):
                self.block(block_id)[offset] = span.path[i]
        return tuple(self._read(span, before) for span in spans)

    def misreads(self, span: Span) -> tuple[Misread, ...]:
        """Positions of `[0, end)` that do not read this history now."""
        return self._read(span, {}).misreads

    def spoil(self, copies: Iterable[tuple[int, int]], spans: Iterable[Span]) -> None:
        """The plan raised: what it was to compute, and was not there already, is garbage."""
        for _, target in copies:
            self._blocks[target] = [None] * self.block_size
        for span in spans:
            for block_id, offset, i in self._slots(span):
                slots = self.block(block_id)
                if slots[offset] is not span.path[i]:
                    slots[offset] = None

    def erase(self, span: Span) -> None:
        """What the row computed is not finite."""
        for block_id, offset, _ in self._slots(span):
            self.block(block_id)[offset] = None

    def _slots(self, span: Span) -> Iterable[tuple[int, int, int]]:
        """`(block, offset, position)` of all that the row writes, as far as its table goes."""
        bs = self.block_size
        for i in range(span.start, min(span.end, len(span.table) * bs, len(span.path))):
            yield span.table[i // bs], i % bs, i

    def _read(self, span: Span, before: dict[int, Slots]) -> Reading:
        bs, found, misreads = self.block_size, [], []
        end = min(span.end, len(span.path))
        for first in range(0, end, bs):
            wanted = list(span.path[first : min(first + bs, end)])
            block_id = span.table[first // bs] if first // bs < len(span.table) else None
            slots: Slots = [None] * bs if block_id is None else self.block(block_id)
            found += slots[: len(wanted)]
            if slots[: len(wanted)] == wanted:
                continue
            old: Slots = slots if block_id is None else before.get(block_id, slots)
            misreads += [
                Misread(first + o, block_id, wanted[o], slots[o], old[o])
                for o in range(len(wanted))
                if slots[o] is not wanted[o]
            ]
        if misreads:
            digests = ",".join(str(node.digest) if node else "-" for node in found)
            return Reading(tuple(misreads), zlib.crc32(digests.encode()))
        return Reading((), span.path[end - 1].digest if end else 0)


def next_token(digest: int, seed: int, sample: int, alphabet: Sequence[int]) -> int:
    """A model: the next token depends on every token read, on the seed and on the sample."""
    return alphabet[zlib.crc32(b"%d,%d" % (seed, sample), digest) % len(alphabet)]
