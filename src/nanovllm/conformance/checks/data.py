"""KV: which positions a row computes, and through which blocks it finds the others."""

from __future__ import annotations

from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.entries import names_of
from nanovllm.conformance.events import Committed, Executed, Planned


@check("KV-1", Planned)
def computed_positions_stay_in_their_blocks(planned: Planned, require: Require) -> None:
    """A position is looked for in the block that its table named when it was computed."""
    bs, copied = planned.book.world.block_size, set(planned.flight.plan.copies)
    for seating in planned.flight.seatings:
        if not seating.kept:
            continue
        num_blocks = -(-seating.num_planned // bs)
        pairs = zip(seating.kept[:num_blocks], seating.row.block_table, strict=False)
        moved = [pair for pair in pairs if pair[0] != pair[1] and pair not in copied]
        require(not moved, seating.entry, "finds computed positions in other blocks:", moved)


@check("KV-5", Planned)
def no_position_is_left_out(planned: Planned, require: Require) -> None:
    for seating in planned.flight.seatings:
        if seating.kept:
            start, computed = seating.row.start, seating.num_planned
            require(start <= computed, seating.entry, "has", computed, "computed, starts at", start)


@check("KV-5", Executed)
def every_position_is_there(executed: Executed, require: Require) -> None:
    """Without a prefix cache, what a row reads is what its request computed."""
    for seating, reading in zip(executed.flight.seatings, executed.readings, strict=True):
        if not executed.book.world.prefix_cache and not seating.entry.misled:
            require(not reading.misreads, seating.entry, "at", *reading.misreads[:1])


@check("KV-7", Planned)
def rows_compute_known_positions(planned: Planned, require: Require) -> None:
    for seating in planned.flight.seatings:
        row, known = seating.row, seating.num_known
        inside = row.start >= 0 and row.end <= known
        require(inside, f"[{row.start}, {row.end}) of the {known} known tokens of", seating.entry)


@check("KV-8", Committed)
def tokens_go_to_their_own_rows(committed: Committed, require: Require) -> None:
    """When some rows of a step draw a token that ends them, these end and no others."""
    rows = {seating.entry.id for seating in committed.flight.seatings}
    expected = {id for id, reason in committed.expected.items() if reason == "stop"}
    if len(committed.tokens) < 2 or not expected or len(expected) == len(rows):
        return
    others = {id for id, reason in committed.expected.items() if reason != "stop"}
    ended = {finished.id for finished in committed.ended} & rows - others
    drew, those = names_of(sorted(expected)), names_of(sorted(ended))
    require(ended == expected, drew, "drew an end; ended:", those)
