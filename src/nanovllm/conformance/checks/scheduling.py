"""SCH: who computes what next."""

from __future__ import annotations

from nanovllm.conformance.book import Book
from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.entries import Entry, names_of
from nanovllm.conformance.events import Crashed, Drained, Ended, Planned
from nanovllm.conformance.protocol import RequestId


def overtaken(planned: Planned) -> list[tuple[Entry, Entry]]:
    """`(waiting, admitted)`: who was admitted while one that arrived before still waits."""
    waiting = [entry for entry in planned.before.queued if not entry.seated and not entry.reason]
    return [
        (entry, admission.entry)
        for admission in planned.flight.admissions
        for entry in waiting
        if entry.id.request < admission.entry.id.request
    ]


@check("SCH-1", Planned)
def first_come_first_served(planned: Planned, require: Require) -> None:
    if len(planned.before.queued) > 1 and planned.flight.admissions:
        late = [pair for pair in overtaken(planned) if not pair[0].num_preemptions]
        require(not late, "(waits, admitted):", late)


@check("SCH-10", Planned)
def resumed_before_later_arrivals(planned: Planned, require: Require) -> None:
    if any(entry.num_preemptions for entry in planned.before.queued) and planned.flight.admissions:
        late = [pair for pair in overtaken(planned) if pair[0].num_preemptions]
        require(not late, "(preempted, admitted):", late)


@check("SCH-2", Planned)
def plans_keep_within_the_budget(planned: Planned, require: Require) -> None:
    total = sum(row.count for row in planned.flight.plan.rows)
    budget = planned.book.world.max_num_batched_tokens
    require(total <= budget, total, "tokens in a plan, at most", budget)


@check("SCH-3", Planned)
def seats_bound_the_running_set(planned: Planned, require: Require) -> None:
    running = [entry for entry in planned.book.seated if not entry.aborting]
    seats = planned.book.world.max_num_seqs
    require(len(running) <= seats, len(running), "run in", seats, "seats:", running)


@check("SCH-4", Planned)
def one_row_each_with_work_in_it(planned: Planned, require: Require) -> None:
    rows = planned.flight.plan.rows
    ids = [row.id for row in rows]
    require(len(set(ids)) == len(ids), "rows of", names_of(ids))
    empty = [row.id for row in rows if row.count < 1]
    require(not empty, "rows without a token:", names_of(empty))


@check("SCH-5", Planned)
def idle_engine_plans_nothing(planned: Planned, require: Require) -> None:
    if not planned.before.num_live:
        rows = planned.flight.plan.rows
        require(not rows, "nothing is to be done, and the plan is", rows)


@check("SCH-5", Crashed)
def idle_engine_never_raises(crashed: Crashed, require: Require) -> None:
    """With a step in flight there may be nothing more to do either."""
    if crashed.call == "schedule" and (crashed.book.flights or not crashed.book.live):
        require(False, "schedule raises:", crashed.summary)


@check("SCH-6", Drained)
def everything_ends_in_time(drained: Drained, require: Require) -> None:
    require(not drained.left, "after", drained.steps, "steps", drained.left, "are not done")


@check("SCH-6", Crashed)
def steps_never_raise(crashed: Crashed, require: Require) -> None:
    if crashed.call in ("schedule", "commit") and crashed.book.live:
        require(False, crashed.call, "raises:", crashed.summary)


@check("SCH-8", Planned)
def victims_have_no_row(planned: Planned, require: Require) -> None:
    """Who is preempted held something; it has no further row in that plan."""
    plan = planned.flight.plan
    if not plan.preempted:
        return
    seated = {entry.id for entry in planned.before.seated}
    rows = {row.id for row in plan.rows}
    victims = set(plan.preempted)
    require(not victims & rows, "preempted and planned:", names_of(sorted(victims & rows)))
    idle = sorted(id for id in victims - seated if not planned.before.uncertain)
    require(not idle, "preempted, but did not run:", names_of(idle))
    require(len(victims) == len(plan.preempted), "preempted twice:", names_of(plan.preempted))


@check("SCH-8", Planned)
def oldest_is_not_preempted_for_a_younger_one(planned: Planned, require: Require) -> None:
    """It may only give way to its own need of a block, and not when it alone holds any."""
    preempted, before = set(planned.flight.plan.preempted), planned.before
    if not preempted or not before.seated or before.num_in_flight or before.uncertain:
        return
    oldest = min(before.seated, key=lambda entry: entry.id)
    others = [entry for entry in before.seated if entry.id not in preempted]
    gave_way = oldest.id in preempted
    require(others or not gave_way, oldest, "is preempted, and nobody else holds blocks")
    younger = [entry for entry in others if entry.id.request > oldest.id.request]
    grew = [e for e in younger if len(e.table) > len(before.tables[e.id])]
    own_need = _needed_a_block(planned, oldest) and not grew
    require(not gave_way or own_need or not younger, oldest, "is preempted for", grew or younger)


def _needed_a_block(planned: Planned, entry: Entry) -> bool:
    """Whether all slots of its table were used, so that it could not go on without another."""
    table = planned.before.tables[entry.id]
    return len(table) * planned.book.world.block_size < entry.num_known


@check("SCH-9", Ended)
def preempted_requests_lose_nothing(ended: Ended, require: Require) -> None:
    entry = ended.entry
    if ended.alone is None or not entry.num_preemptions:
        return
    completion, reason = ended.alone
    if entry.reason in ("stop", "length"):
        right = (entry.completion, entry.reason) == (completion, reason)
    else:
        right = entry.completion == completion[: len(entry.completion)]
    require(right, entry, "ended by", entry.reason, "alone:", completion, reason)


@check("SCH-9", Crashed)
def resumed_requests_keep_their_outputs(crashed: Crashed, require: Require) -> None:
    """An engine that forgot outputs asks for a token where the next one is known already."""
    if crashed.call == "commit" and (forgot := _forgotten(crashed.book)):
        require(False, "outputs of", names_of(forgot), "are forgotten:", crashed.summary)


def _forgotten(book: Book) -> list[RequestId]:
    seatings = book.flights[0].seatings if book.flights else ()
    return [
        seating.entry.id
        for seating in seatings
        if seating.entry.num_preemptions
        and len(seating.entry.prompt) <= seating.row.end < seating.num_known
    ]


@check("SCH-14", Ended, "chunked_prefill")
def chunked_equals_unchunked(ended: Ended, require: Require) -> None:
    entry = ended.entry
    if ended.alone is not None and entry.chunked and entry.reason in ("stop", "length"):
        got = entry.completion, entry.reason
        require(got == ended.alone, entry, "ended by", entry.reason, "alone:", *ended.alone)
