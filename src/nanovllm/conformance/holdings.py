"""Who holds which block, and what must be hittable: the block side of the book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from nanovllm.conformance.entries import Entry, Resident
from nanovllm.conformance.shadow import History


class Holdings:
    """Blocks as tables name them.

    Attributes:
        held: block -> number of live table entries that name it.
        resident: block -> full content that was computed there, committed and not replaced since.
        lost: contents of which one of several copies was replaced (PFX-15).
        released_at: free block -> the call in which its last holder let go.
        meant: block -> who took it last, and for which of its own blocks.
        replaced: contents that gave way since `begin`.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held: Counter[int] = Counter()
        self.resident: dict[int, Resident] = {}
        self.lost: set[History] = set()
        self.released_at: dict[int, int] = {}
        self.meant: dict[int, tuple[Entry, int]] = {}
        self.replaced: list[Resident] = []
        self._copies_of: dict[History, set[int]] = {}
        self._clock = 0

    def begin(self) -> None:
        """Another call at the door."""
        self._clock += 1
        self.replaced.clear()

    # ---- reading ---------------------------------------------------------------------------

    def copies_of(self, content: History) -> set[int]:
        """Blocks that must be hittable for this content."""
        return self._copies_of.get(content, set())

    def run(self, contents: Iterable[History]) -> tuple[tuple[Resident, ...], ...]:
        """Copies of each of these, up to the first of which there is none."""
        found = []
        for content in contents:
            copies = self.copies_of(content)
            if not copies:
                break
            found.append(tuple(self.resident[block_id] for block_id in sorted(copies)))
        return tuple(found)

    # ---- writing ---------------------------------------------------------------------------

    def hold(self, entry: Entry, table: tuple[int, ...], num_hits: int) -> None:
        """The entry's table is this one; what it takes anew replaces what was there.

        Args:
            num_hits: leading blocks that an entry without a table found rather than took.
        """
        old = entry.table
        for i, block_id in enumerate(table):
            if i < len(old) and old[i] == block_id:
                continue
            if old or i >= num_hits:
                self._take(block_id, entry, i)
            self.released_at.pop(block_id, None)
        self.held.subtract(old)
        self.held.update(table)
        entry.table, entry.seated = table, True

    def release(self, entry: Entry) -> None:
        self.held.subtract(entry.table)
        for block_id in entry.table:
            if not self.held[block_id]:
                self.released_at[block_id] = self._clock
        entry.table, entry.seated, entry.forgotten = (), False, False

    def publish(self, entry: Entry, table: Sequence[int], indices: Iterable[int]) -> None:
        """These blocks of a table were filled, and must be hittable from now on (PFX-8, PFX-16)."""
        if entry.forgotten:
            return
        contents = entry.contents(self.block_size)
        for i in indices:
            if table[i] not in self.resident:
                self.resident[table[i]] = Resident(table[i], contents[i], entry)
                self._copies_of.setdefault(contents[i], set()).add(table[i])
                self.lost.discard(contents[i])

    def forget_all(self) -> None:
        """Nothing needs to be hittable any more."""
        for block_id in tuple(self.resident):
            self._forget(block_id)
        self.lost.clear()

    def copy(self, source: int, target: int) -> None:
        """The target is meant for what the source is meant for."""
        entry, index = self.meant.get(source, (None, 0))
        self._replace(target, entry, index)

    def _take(self, block_id: int, entry: Entry, index: int) -> None:
        """It is to hold this block of the entry; its own content may be computed there again."""
        contents = entry.contents(self.block_size)
        found = self.resident.get(block_id)
        if found is None or index >= len(contents) or found.content is not contents[index]:
            self._replace(block_id, entry, index)
        elif not self.held[block_id]:
            # Taken as a free block or found as a hit: whether it stays published is not known.
            self._forget(block_id)

    def _replace(self, block_id: int, entry: Entry | None, index: int) -> None:
        gone = self._forget(block_id)
        if gone is not None:
            self.replaced.append(gone)
            if self.copies_of(gone.content):
                self.lost.add(gone.content)
        self.released_at.pop(block_id, None)
        if entry is not None:
            self.meant[block_id] = (entry, index)

    def _forget(self, block_id: int) -> Resident | None:
        gone = self.resident.pop(block_id, None)
        if gone is not None:
            self._copies_of[gone.content].discard(block_id)
        return gone
