"""A blocks door and a book of it, written from tables alone; every call is judged at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nanovllm.conformance.protocol import BlocksDoor, PoolView, World
from nanovllm.conformance.scenarios.track import ceil_div
from nanovllm.conformance.verdicts import Evaluations

Content = tuple[int, ...]
"""All tokens up to the end of a full block: what its KV depends on."""


class Shelf:
    """A blocks door that was just reset, its requests, and what each block holds."""

    def __init__(self, door: BlocksDoor, world: World, seen: Evaluations) -> None:
        self.door = door
        self.world = world
        self.seen = seen
        self.caches = world.prefix_cache and "prefix_cache" in door.hello().capabilities
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, tuple[int, ...]] = {}
        self.contents: dict[int, Content] = {}
        self.num_requests = 0
        self.duplicated: set[Content] = set()
        self.generated: set[Content] = set()  # completed by an appended token, in no prompt
        self.judges_completeness = True  # not under an injected hash (PFX-11)
        door.reset(world)

    # ---- the calls -------------------------------------------------------------------------

    def allocate(self, tokens: Sequence[int]) -> int | None:
        """A new request; its number, or None if blocks are short."""
        request, n, bs = self.num_requests, len(tokens), self.world.block_size
        self.num_requests += 1
        before = self.door.pool()
        answer = self.door.allocate(request, list(tokens))
        if answer is None:
            # Under load that hits need no free block is policy (PFX-10).
            self._expect_short(before, ceil_div(n, bs), "PFX-10")
            return None
        table, cached = tuple(answer[0]), answer[1]
        self._expect(len(table) == ceil_div(n, bs), "BLK-5", f"{len(table)} blocks for {n} tokens")
        if self.caches:
            self._expect_hits(tokens, cached)
        self._expect_own(tokens, table, cached)
        self._take(table[ceil_div(cached, bs) :])
        self.tokens[request], self.tables[request] = list(tokens), table
        self.generated -= set(self._compute(request))
        self.check()
        return request

    def append(self, request: int, token: int) -> bool:
        """False if blocks are short."""
        before = self.door.pool()
        old, n, bs = self.tables[request], len(self.tokens[request]), self.world.block_size
        answer = self.door.append(request, token)
        if answer is None:
            self._expect_short(before, int(n % bs == 0), "BLK-5")
            return False
        table = tuple(answer)
        grown = len(old) + (n % bs == 0)
        good = len(table) == grown and table[: len(old)] == old
        self._expect(good, "BLK-5", f"position {n}: table {old} became {table}, bs={bs}")
        self._take(table[len(old) :])
        self.tokens[request].append(token)
        self.tables[request] = table
        known = set(self.contents.values())
        self.generated |= set(self._compute(request)) - known
        self.check()
        return True

    def release(self, request: int) -> None:
        self.door.release(request)
        del self.tokens[request], self.tables[request]
        self.check()

    # ---- what is right ---------------------------------------------------------------------

    def resident(self, tokens: Sequence[int], *, twins: bool = True, generated: bool = True) -> int:
        """Leading full blocks of `tokens` that some block holds.

        Without `twins`, what two blocks held at a time does not count: whether one of them is
        found after the other was lost is PFX-15, and not what every scenario is about. Likewise
        `generated` blocks, which are PFX-16.
        """
        bs, held = self.world.block_size, set(self.contents.values())
        if not twins:
            held -= self.duplicated
        if not generated:
            held -= self.generated
        full = len(tokens) // bs if self.caches else 0
        missing = (i for i in range(full) if tuple(tokens[: (i + 1) * bs]) not in held)
        return next(missing, full)

    def expect_lookup(self, tokens: Sequence[int], spec_id: str, twins: bool = False) -> None:
        bs, most = self.world.block_size, self.resident(tokens) * self.world.block_size
        found = self.door.lookup([*tokens, 0])  # so that no lookup leaves the last block out
        for generated, judged in ((False, spec_id), (True, "PFX-16")):
            least = self.resident(tokens, twins=twins, generated=generated) * bs
            said = f"lookup of {list(tokens)} finds {found} tokens, expected {least} to {most}"
            self._expect(least <= found <= most, judged, said)

    def _expect_hits(self, tokens: Sequence[int], cached: int) -> None:
        bs, n = self.world.block_size, len(tokens)
        self._expect(cached < n, "PFX-6", f"all of {n} tokens are cached")
        if self.judges_completeness:
            resident = self.resident(tokens)
            certain = self.resident(tokens, twins=False, generated=False)
            least = bs * min(certain, (n - 1) // bs)
            most = min(bs * resident, n - 1)
            said = f"{cached} of {n} tokens cached, expected {least} to {most}"
            self._expect(least <= cached <= most, "PFX-11", said)

    def check(self) -> None:
        """The pool, against the tables that live."""
        pool = self.door.pool()
        used = {b: k for b, k in pool.ref_counts.items() if k and b not in pool.reserved}
        listed = sorted([*pool.free, *used, *pool.reserved])
        whole = len(set(listed)) == len(listed) == self.world.num_blocks
        self._expect(whole, "BLK-1", f"free {pool.free}, used {used}, reserved {pool.reserved}")
        held = Counter(block for table in self.tables.values() for block in table)
        self._expect(used == held, "BLK-2", f"ref counts {used}, tables {self.tables}")
        if self.caches:
            self._check_published(pool)

    def _check_published(self, pool: PoolView) -> None:
        n, entries = self.world.num_blocks, pool.published
        self._expect(len(entries) <= n, "PFX-7", f"{len(entries)} entries for {n} blocks")
        for entry in entries:
            content = self.contents.get(entry.block)
            own = content[-self.world.block_size :] if content else None
            claimed = own if entry.token_ids is None else entry.token_ids
            short = 0 < len(claimed or ()) < self.world.block_size
            self._expect(not short, "PFX-3", f"{entry} is published and not full")
            same = own is not None and claimed == own
            self._expect(same, "PFX-7", f"{entry} is published; the block holds {own}")

    def _expect(self, holds: object, spec_id: str, message: str) -> None:
        self.seen.require(holds, spec_id, message)

    def _expect_short(self, before: PoolView, needed: int, spec_id: str) -> None:
        """A refusal is right, and changes nothing."""
        free = len(before.free)
        self._expect(free < needed, spec_id, f"refused: {needed} blocks needed, {free} free")
        after = self.door.pool()
        same = _state(before) == _state(after)
        self._expect(same, "BLK-3", f"a refusal changed {before} to {after}")

    def _expect_own(self, tokens: Sequence[int], table: Sequence[int], cached: int) -> None:
        """What was cached is this request's own history; the rest is nobody's (BLK-8)."""
        bs = self.world.block_size
        for i, block in enumerate(table):
            if i * bs < cached:
                own = tuple(tokens[: (i + 1) * bs])
                held = self.contents.get(block)
                self._expect(held == own, "PFX-2", f"block {block} holds {held}, a hit for {own}")

    def _take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            holders = [r for r, table in self.tables.items() if block in table]
            self._expect(
                not holders, "BLK-8", f"block {block} is given, requests {holders} hold it"
            )
            self.contents.pop(block, None)

    def _compute(self, request: int) -> list[Content]:
        """All its full blocks hold what they are for; what that is."""
        tokens, table, bs = self.tokens[request], self.tables[request], self.world.block_size
        full = [tuple(tokens[: (i + 1) * bs]) for i in range(len(tokens) // bs)]
        for block, content in zip(table, full, strict=False):
            self.contents[block] = content
            if sum(held == content for held in self.contents.values()) > 1:
                self.duplicated.add(content)
        return full


def _state(pool: PoolView) -> tuple[frozenset[int], dict[int, int], frozenset[int]]:
    used = {block: count for block, count in pool.ref_counts.items() if count}
    return frozenset(pool.free), used, frozenset(entry.block for entry in pool.published)
