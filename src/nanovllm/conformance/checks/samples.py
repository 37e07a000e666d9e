"""FRK: several samples of one prompt."""

from __future__ import annotations

from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.checks.ends import ends_in_time, sampling
from nanovllm.conformance.events import Aborted, Committed, Drained, Ended, Planned
from nanovllm.conformance.protocol import RequestId


@check("FRK-1", Ended, "n")
def samples_equal_single_requests(ended: Ended, require: Require) -> None:
    entry = ended.entry
    if ended.alone is None or entry.options.n < 2 or entry.reason not in ("stop", "length"):
        return
    got = entry.completion, entry.reason
    require(got == ended.alone, entry, "ended by", entry.reason, "alone:", *ended.alone)


@check("FRK-1", Committed, "n")
def samples_end_by_their_own_tokens(committed: Committed, require: Require) -> None:
    for id in sampling(committed):
        entry = committed.book.entries[id]
        if entry.options.n > 1 and not entry.is_cut:
            right = ends_in_time(committed, id)
            require(right, entry, "drew", committed.tokens[id], "and does not end as it should")


@check("FRK-2", Planned, "n")
def samples_share_the_prompt(planned: Planned, require: Require) -> None:
    """A sample finds the full blocks of the prompt in use, if the first one still holds them."""
    book, bs = planned.book, planned.book.world.block_size
    if book.world.hash != "real":
        return
    for admission in planned.flight.admissions:
        entry, row = admission.entry, admission.seating.row
        leader = book.entries[RequestId(entry.id.request, 0)]
        full = (len(entry.prompt) - 1) // bs
        if entry is leader or not full or not leader.seated:
            continue
        if entry.num_admissions > 1 or leader.num_preemptions or leader.forgotten:
            continue  # what was computed may be gone
        require(row.start >= full * bs, entry, "computes the prompt again from", row.start)
        alone = [b for b in row.block_table[:full] if book.blocks.held[b] < 2]
        require(not alone, "blocks", alone, "of", entry, "are not shared with", leader)


@check("FRK-3", Drained, "n")
def more_samples_than_seats_end(drained: Drained, require: Require) -> None:
    seats = drained.book.world.max_num_seqs
    for entry in drained.requests:
        if entry.options.n > seats:
            require(entry.reason, entry, "of", entry.options.n, "samples does not end")


@check("FRK-3", Aborted, "n", "abort")
def abort_drops_all_samples(aborted: Aborted, require: Require) -> None:
    entries = [e for e in aborted.book.entries.values() if e.id.request == aborted.request]
    if len(entries) > 1 and aborted.alive:
        require(aborted.took, "samples of", entries[0], "are alive, but abort says they are not")


@check("FRK-3", Planned, "n", "abort")
def aborted_samples_have_no_rows(planned: Planned, require: Require) -> None:
    entries = planned.book.entries
    if any(entry.reason == "abort" and entry.options.n > 1 for entry in entries.values()):
        strangers = [entries[row.id] for row in planned.flight.strangers if row.id in entries]
        late = [e for e in strangers if e.reason == "abort" and e.options.n > 1]
        require(not late, "they were aborted, and have rows:", late)
