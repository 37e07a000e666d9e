"""PFX: what the prefix cache says of itself, what it gives up, whom it lets in."""

from __future__ import annotations

from collections.abc import Iterator

from nanovllm.conformance.book import Book
from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.entries import Resident
from nanovllm.conformance.events import Crashed, Planned, Started, State
from nanovllm.conformance.protocol import PoolView, Published


def is_quiet(state: State) -> bool:
    """Whether nothing is in flight, so that what is published must have been computed."""
    return state.pool is not None and state.settled and not state.book.flights


def published(state: State) -> tuple[Published, ...]:
    return state.pool.published if state.pool is not None and is_quiet(state) else ()


def takers_tokens(book: Book, block_id: int) -> tuple[int, ...]:
    """Tokens that whoever took the block last knows of it."""
    if block_id not in book.blocks.meant:
        return ()
    entry, index = book.blocks.meant[block_id]
    bs = book.world.block_size
    return tuple(node.token for node in entry.path[index * bs : (index + 1) * bs])


def reachable(state: State, *, lost: bool = False) -> Iterator[tuple[Resident, ...]]:
    """Copies of each content that a look-up must find: its ancestors are there too.

    Args:
        lost: also where one of the copies of it, or of an ancestor, was replaced (PFX-15).
    """
    book, bs = state.book, state.book.world.block_size
    if not (is_quiet(state) and book.caches):
        return
    for content in {resident.content for resident in book.blocks.resident.values()}:
        node = content
        while node.depth and book.blocks.copies_of(node):
            if node in book.blocks.lost and not lost:
                break
            for _ in range(bs):
                assert node.parent is not None
                node = node.parent
        if not node.depth:
            yield tuple(book.blocks.resident[b] for b in sorted(book.blocks.copies_of(content)))


def names_none(pool: PoolView | None, copies: tuple[Resident, ...]) -> bool:
    listed = {entry.block for entry in pool.published} if pool else set()
    return not any(copy.block in listed for copy in copies)


@check("PFX-1", Started, "prefix_cache", "hash")
def different_content_has_different_hashes(started: Started, require: Require) -> None:
    """Of a tree of blocks, each behind the hash of its parent; asked twice, the same."""
    if started.book.world.hash != "real":
        return
    seen: dict[str, tuple[tuple[int, ...], str | None]] = {}
    for tokens, parent, value in started.hashes:
        content = seen.setdefault(value, (tokens, parent))
        require(content == (tokens, parent), content, "and", (tokens, parent), "have", value)
    require(len(seen) == len({h[:2] for h in started.hashes}), "a hash changes when asked twice")


@check("PFX-1", Crashed, "prefix_cache", "hash")
def hashes_can_be_told(crashed: Crashed, require: Require) -> None:
    if crashed.call == "hash":
        require(False, "a hash cannot be told:", crashed.summary)


@check("PFX-3", State, "prefix_cache", "pool")
def only_full_blocks_are_published(state: State, require: Require) -> None:
    bs = state.book.world.block_size
    for entry in published(state):
        known = len(takers_tokens(state.book, entry.block))
        own = bs if entry.token_ids is None else len(entry.token_ids)
        short = 0 < own < bs or known < bs
        require(not short, "block", entry.block, "is published with", min(own, known), "tokens")


@check("PFX-4", State, "prefix_cache", "pool")
def published_blocks_were_computed(state: State, require: Require) -> None:
    bs = state.book.world.block_size
    for entry in published(state):
        if len(takers_tokens(state.book, entry.block)) == bs:
            slots = state.shadow.block(entry.block)
            require(None not in slots, "block", entry.block, "is published, not computed")


@check("PFX-7", State, "prefix_cache", "pool")
def entries_hold_what_they_say(state: State, require: Require) -> None:
    entries, n = published(state), state.book.world.num_blocks
    if not is_quiet(state):
        return
    blocks = [entry.block for entry in entries]
    require(len(blocks) <= n, len(blocks), "entries for", n, "blocks")
    require(len(set(blocks)) == len(blocks), "entries name", sorted(blocks))
    for entry in entries:
        if None in state.shadow.block(entry.block):
            continue
        content = state.shadow.content(entry.block)
        own = content.tokens[-state.shadow.block_size :] if content else ()
        right = bool(content) and entry.token_ids in (None, own)
        require(right, "block", entry.block, "holds", content, "published as", entry.token_ids)


@check("PFX-8", State, "prefix_cache", "pool")
def freed_blocks_stay_published(state: State, require: Require) -> None:
    for copies in reachable(state):
        used = any(state.book.blocks.held[copy.block] for copy in copies)
        if not used and not copies[0].generated:
            hidden = names_none(state.pool, copies)
            require(not hidden, "nothing reused", copies[0].block, "yet it is not published")


@check("PFX-15", State, "prefix_cache", "pool")
def copies_are_published_when_one_is_lost(state: State, require: Require) -> None:
    for copies in reachable(state, lost=True):
        if copies[0].content in state.book.blocks.lost:
            hidden = names_none(state.pool, copies)
            require(not hidden, "block", copies[0].block, "holds the other copy, not published")


@check("PFX-16", State, "prefix_cache", "pool")
def generated_blocks_are_published(state: State, require: Require) -> None:
    for copies in reachable(state):
        if all(copy.generated and not copy.producer.seated for copy in copies):
            hidden = names_none(state.pool, copies)
            require(not hidden, "block", copies[0].block, "of", copies[0].producer, "is lost")


@check("PFX-9", Planned, "prefix_cache")
def least_recently_released_goes_first(planned: Planned, require: Require) -> None:
    """Blocks that one call released are tied, except that a descendant goes before its ancestor."""
    book, before = planned.book, planned.before
    if not book.caches or before.uncertain or before.num_in_flight:
        return
    left = [
        resident
        for block_id, resident in book.blocks.resident.items()
        if block_id in before.released_at
        and block_id in book.blocks.released_at
        and resident.content not in book.blocks.lost
    ]
    for gone in planned.flight.replaced:
        when = before.released_at.get(gone.block)
        if when is None or not left:
            continue
        older = [
            resident.block
            for resident in left
            if before.released_at[resident.block] < when
            or (
                before.released_at[resident.block] == when
                and resident.content.depth > gone.content.depth
                and resident.content.begins_with(gone.content)
                and not book.blocks.copies_of(gone.content)
            )
        ]
        require(not older, "block", gone.block, "is reused before", older)


@check("PFX-10", Planned, "prefix_cache")
def idle_engine_admits(planned: Planned, require: Require) -> None:
    """When nothing runs, every block can be had, so that whoever was accepted fits."""
    before = planned.before
    if before.seated or before.num_in_flight or before.uncertain:
        return
    if any(entry.seated or entry.reason for entry in before.queued):
        require(True)
    elif before.queued:
        require(False, "nothing runs, and none of", before.queued, "is admitted")


@check("PFX-10", Crashed, "prefix_cache")
def hits_on_free_blocks_use_them_up(crashed: Crashed, require: Require) -> None:
    """Not when it raises because it admits who does not fit by this arithmetic; it may as well
    raise for somebody who runs and needs a block."""
    book = crashed.book
    bs, held = book.world.block_size, +book.blocks.held
    num_free = book.world.num_blocks - len(held)
    growing = any(len(entry.table) * bs < entry.num_known for entry in book.seated)
    for entry in book.queued if crashed.call == "schedule" and not growing else ():
        run = book.blocks.run(entry.contents(bs))[: (entry.num_known - 1) // bs]
        revived = sum(not any(copy.block in held for copy in copies) for copies in run)
        missing = -(-entry.num_known // bs) - len(run)
        if missing <= num_free < missing + revived:
            require(False, entry, "needs", missing, "+", revived, "of", num_free, crashed.summary)


@check("PFX-17", State, "prefix_cache", "stats")
def requests_count_once(state: State, require: Require) -> None:
    """Between the whole blocks found by first samples alone, and those found by all samples.

    A block that was found and of which a token was computed again may count or not.
    """
    if state.stats is None or state.book.flights or state.book.uncertain:
        return
    bs = state.book.world.block_size
    found = {e.id: e.num_cached for e in state.book.entries.values() if e.num_cached is not None}
    least = sum(n // bs * bs for id, n in found.items() if not id.sample)
    most = sum(-(-n // bs) * bs for n in found.values())
    counted = state.stats.num_cached_tokens
    require(least <= counted <= most, counted, "cached tokens counted,", dict(found), "found")


@check("PFX-17", Crashed, "prefix_cache", "stats")
def statistics_can_be_told(crashed: Crashed, require: Require) -> None:
    if crashed.call == "stats":
        require(False, "statistics cannot be told:", crashed.summary)
