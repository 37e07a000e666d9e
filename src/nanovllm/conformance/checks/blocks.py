"""BLK: physical blocks."""

from __future__ import annotations

from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.events import Added, Crashed, Executed, Planned, State
from nanovllm.conformance.protocol import PoolView


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def used(pool: PoolView) -> dict[int, int]:
    """Reference counts of blocks that are held."""
    return {b: n for b, n in pool.ref_counts.items() if n > 0 and b not in pool.reserved}


@check("BLK-1", State, "pool")
def every_block_is_free_or_used(state: State, require: Require) -> None:
    pool, before, n = state.pool, state.pool_before, state.book.world.num_blocks
    if pool is None:
        return
    listed = [*pool.free, *used(pool)]
    require(len(set(listed)) == len(listed), "listed twice:", sorted(listed))
    # Whether a reserved block is one of the N is the adapter's way of counting.
    sizes = len(listed), len(listed) + len(pool.reserved)
    require(n in sizes, "free", pool.free, "used", sorted(used(pool)), "of", n, "blocks")
    if before is not None:
        require(set(pool.reserved) == set(before.reserved), "reserved", pool.reserved)
        same = {*listed, *pool.reserved} == {*before.free, *used(before), *before.reserved}
        require(same, "blocks appear or vanish:", sorted(listed))


@check("BLK-1", Crashed, "pool")
def pool_can_be_told(crashed: Crashed, require: Require) -> None:
    if crashed.call == "pool":
        require(False, "the pool cannot be told:", crashed.summary)


@check("BLK-2", State, "pool")
def ref_counts_are_table_entries(state: State, require: Require) -> None:
    if state.pool is None or not state.settled:
        return
    counts, held = used(state.pool), dict(+state.book.blocks.held)
    require(counts == held, "reference counts", counts, "live tables name", held)


@check("BLK-3", State, "pool")
def refused_allocation_changes_nothing(state: State, require: Require) -> None:
    """What a plan took is in a table; a request that was not admitted got nothing."""
    book = state.book
    if state.pool is None or not state.settled or state.call != "schedule" or not book.queued:
        return
    before = used(state.pool_before) if state.pool_before else {}
    leaked = {
        block_id: count
        for block_id, count in used(state.pool).items()
        if count > max(book.blocks.held[block_id], before.get(block_id, 0))
    }
    require(not leaked, "taken, and in no table:", leaked, "while", book.queued, "wait")


@check("BLK-4", Planned)
def table_covers_the_row_and_no_more(planned: Planned, require: Require) -> None:
    book, bs = planned.book, planned.book.world.block_size
    for seating in planned.flight.seatings:
        entry, row, held = seating.entry, seating.row, len(seating.row.block_table)
        least = ceil_div(row.end, bs)
        most = ceil_div(len(entry.prompt) + entry.max_tokens - 1, bs) + book.hello.ahead
        require(held >= least, held, "blocks for positions up to", row.end, "of", entry)
        require(held <= max(most, least), held, "blocks, at most", most, "for", entry)


@check("BLK-5", Planned)
def decode_takes_a_block_when_the_last_is_full(planned: Planned, require: Require) -> None:
    book, bs = planned.book, planned.book.world.block_size
    for seating in planned.flight.seatings:
        row, held = seating.row, len(seating.row.block_table)
        if row.count != 1 or not seating.kept:
            continue
        needed = row.start // bs + 1
        require(held >= needed, held, "blocks for position", row.start, "of", seating.entry)
        grew = held - len(seating.kept)
        may = (row.start % bs == 0) + book.hello.ahead
        require(grew <= may, grew, "blocks taken for position", row.start, "of", seating.entry)


@check("BLK-6", Planned)
def last_token_is_never_stored(planned: Planned, require: Require) -> None:
    for seating in planned.flight.seatings:
        entry, end = seating.entry, seating.row.end
        last = len(entry.prompt) + entry.room - 1
        if entry.overdue:
            continue  # SCH-7d
        require(end <= last, "positions up to", end, "are computed, at most", last, "of", entry)


@check("BLK-6", Added)
def request_that_just_fits_is_taken(added: Added, require: Require) -> None:
    """`ceil((p + k - 1) / bs)` blocks are enough, where storing every token would need more."""
    world, p = added.book.world, len(added.prompt)
    stored = p + added.max_tokens - 1
    chunked = "chunked_prefill" in added.book.hello.capabilities
    if p < 1 or added.max_tokens < 1 or added.options.min_tokens > added.max_tokens:
        return
    if stored >= world.max_model_len or (not chunked and stored > world.max_num_batched_tokens):
        return
    if stored == world.num_blocks * world.block_size:
        require(added.refusal is None, stored, "slots suffice, but:", added.refusal)


@check("BLK-8", Executed)
def rows_read_what_they_wrote(executed: Executed, require: Require) -> None:
    """Nor does a row read what another one of its step wrote over it."""
    for seating, reading in zip(executed.flight.seatings, executed.readings, strict=True):
        if seating.entry.misled and seating.kept:
            continue
        start = 0 if seating.kept else seating.row.start
        wrong = [
            misread
            for misread in reading.misreads
            if misread.block is not None
            and (misread.position >= start or misread.before is misread.wanted)
        ]
        require(not wrong, seating.entry, "at", *wrong[:1])


@check("BLK-8", State)
def tables_keep_what_they_hold(state: State, require: Require) -> None:
    """No step changes what a live table reads, whether it is in that step or not."""
    if state.call != "commit":
        return
    for entry in state.book.seated:
        if not entry.misled:
            wrong = state.shadow.misreads(entry.span(0, entry.num_computed, entry.table))
            require(not wrong, entry, "at", *wrong[:1])


@check("BLK-8", State)
def shared_blocks_are_full(state: State, require: Require) -> None:
    book, bs = state.book, state.book.world.block_size
    if book.flights or "cow" in book.hello.capabilities:
        return
    for entry in book.seated:
        for i, block_id in enumerate(entry.table):
            if book.blocks.held[block_id] > 1 and not entry.misled:
                full = (i + 1) * bs <= entry.num_computed
                require(full, "block", block_id, "of", entry, "has two holders and is not full")
