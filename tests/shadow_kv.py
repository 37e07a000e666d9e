"""The oracle of the core door: every slot of the KV cache holds the token history computed there.

A real cache holds vectors that depend on all tokens up to their position; here a slot holds these
tokens themselves. So whatever a plan reads tells whether it is this request's own history, and a
wrong block, a stale hit or a slot read too early shows as a story in tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class RequirementError(AssertionError):
    """A requirement does not hold; the message begins with its id."""


def require(holds: object, spec_id: str, *message: object) -> None:
    """`message` is put together only when it is needed: most of a run's time would go there."""
    if not holds:
        raise RequirementError(f"{spec_id}: {' '.join(map(str, message))}")


class History(NamedTuple):
    """Tokens of one sequence from its start; equal tokens of different `root`s never share."""

    root: str | None
    tokens: tuple[int, ...]

    def up_to(self, end: int) -> History:
        return History(self.root, self.tokens[:end])


class Row(NamedTuple):
    """Compute positions `[start, end)` of `history`, whose last position is `end - 1`."""

    history: History
    start: int
    table: Sequence[int]


GARBAGE = History("garbage", ())


class ShadowKV:
    """What each `(block, offset)` holds; absent is never written."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._slots: dict[tuple[int, int], History] = {}

    def execute(self, rows: Iterable[Row]) -> list[History]:
        """All writes, then all reads, since rows of one step may share blocks.

        Returns what each row's last position reads.
        """
        rows = list(rows)
        for row in rows:
            self._write(row)
        return [self.read(row.history, row.table) for row in rows]

    def read(self, history: History, table: Sequence[int]) -> History:
        """Read every position of `history` through `table`; each must be its own (KV-1, KV-5)."""
        found = History(history.root, ())
        for i in range(len(history.tokens)):
            require(i // self.block_size < len(table), "BLK-4", "no block for position", i)
            slot = table[i // self.block_size], i % self.block_size
            found = self._slots.get(slot, History(None, ()))
            require(
                found == history.up_to(i + 1),
                "BLK-8, PFX-2, PFX-4",
                *("position", i, "of", history, "reads", found, "from slot", slot),
            )
        return found

    def spoil(self, rows: Iterable[Row]) -> None:
        """The step raised, or its values are not finite: what it was to write is garbage."""
        for row in rows:
            for i in range(row.start, len(row.history.tokens)):
                self._slots[self._slot(row, i)] = GARBAGE

    def holds(self, history: History, block_id: int) -> bool:
        """Whether the block holds the last `block_size` positions of `history`."""
        first = len(history.tokens) - self.block_size
        return all(
            self._slots.get((block_id, offset)) == history.up_to(first + offset + 1)
            for offset in range(self.block_size)
        )

    def _write(self, row: Row) -> None:
        for i in range(row.start, len(row.history.tokens)):
            self._slots[self._slot(row, i)] = row.history.up_to(i + 1)

    def _slot(self, row: Row, i: int) -> tuple[int, int]:
        require(i // self.block_size < len(row.table), "BLK-4", "no block for position", i)
        return row.table[i // self.block_size], i % self.block_size


def next_token(tokens: Sequence[int], seed: int, alphabet: Sequence[int]) -> int:
    """A model: the next token depends on every token read, and on the seed."""
    digest = zlib.crc32(",".join(map(str, (seed, *tokens))).encode())
    return alphabet[digest % len(alphabet)]
