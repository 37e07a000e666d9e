"""SCH-7d, SCH-12 to SCH-15: why a request ends, what abort and a failed step leave."""

from __future__ import annotations

from nanovllm.conformance.checks.blocks import used
from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.entries import name_of, names_of
from nanovllm.conformance.events import (
    Aborted,
    Committed,
    Crashed,
    Drained,
    Executed,
    Failed,
    Planned,
    State,
)
from nanovllm.conformance.protocol import RequestId

# ---- why it ends ---------------------------------------------------------------------------------


def told(committed: Committed) -> dict[RequestId, str]:
    return {finished.id: finished.reason for finished in committed.ended}


def draws(committed: Committed, id: RequestId) -> tuple[bool, bool]:
    """Whether its token is an end-of-sequence that it does not ignore; whether a stop id."""
    entry, token = committed.book.entries[id], committed.tokens[id]
    is_eos = token in committed.book.world.eos_token_ids
    return is_eos and not entry.options.ignore_eos, token in entry.options.stop_token_ids


def sampling(committed: Committed) -> list[RequestId]:
    """Rows whose token decides whether their request goes on."""
    return [
        seating.entry.id
        for seating in committed.flight.seatings
        if seating.entry.id in committed.tokens
        and seating.entry.id in committed.book.live
        and not seating.entry.aborting
        and not seating.entry.open_end
    ]


@check("SCH-7d", Committed)
def cut_requests_may_end_now(committed: Committed, require: Require) -> None:
    for id in sampling(committed):
        entry = committed.book.entries[id]
        if entry.is_cut and id in told(committed):
            reason, expected = told(committed)[id], committed.expected.get(id)
            require(reason == expected, entry, "ended by", reason, "instead of", expected)


@check("SCH-7d", Planned)
def cut_requests_end_at_the_latest_now(planned: Planned, require: Require) -> None:
    for entry in planned.book.entries.values():
        if entry.overdue and not planned.before.num_in_flight:
            message = (entry, "goes on, there is room for", entry.room, "outputs")
            require(entry.reason is not None, *message)


@check("SCH-12d", Planned)
def nobody_is_given_up_without_a_reason(planned: Planned, require: Require) -> None:
    for finished in planned.flight.plan.finished:
        entry = planned.book.entries.get(finished.id)
        known = entry is not None and not entry.restored
        full = known and entry is not None and len(entry.completion) == entry.room
        right = (finished.reason == "length" and full) or (
            finished.reason == "abort" and entry is not None and entry.aborting
        )
        require(right, entry or name_of(finished.id), "is given up with reason", finished.reason)


@check("SCH-12a", Committed)
def eos_ends(committed: Committed, require: Require) -> None:
    ended, eos = told(committed), committed.book.world.eos_token_ids
    for id in sampling(committed):
        entry = committed.book.entries[id]
        if committed.tokens[id] in eos and not (draws(committed, id)[1] or entry.is_cut):
            ends = not entry.options.ignore_eos or committed.expected.get(id) == "length"
            require((id in ended) == ends, entry, "drew an eos; ended:", id in ended)


@check("SCH-12b", Committed)
def max_tokens_end(committed: Committed, require: Require) -> None:
    ended, eos = told(committed), committed.book.world.eos_token_ids
    for id in sampling(committed):
        entry = committed.book.entries[id]
        if committed.tokens[id] in eos or any(draws(committed, id)):
            continue
        ends = committed.expected.get(id) == "length"
        if entry.is_cut:
            continue
        k = len(entry.completion)
        require((id in ended) == ends, entry, f"has {k} of {entry.room}; ended:", id in ended)


@check("SCH-12c", Committed, "stop")
def stop_ids_end(committed: Committed, require: Require) -> None:
    ended = told(committed)
    for id in sampling(committed):
        if draws(committed, id)[1]:
            require(id in ended, committed.book.entries[id], "drew a stop id and goes on")


@check("SCH-12d", Committed)
def reasons_are_right(committed: Committed, require: Require) -> None:
    """`stop` wins over `length`; nobody ends twice."""
    ids = [finished.id for finished in committed.ended]
    require(len(set(ids)) == len(ids), "ended twice:", names_of(ids))
    for id in sampling(committed):
        got, expected = told(committed).get(id), committed.expected.get(id)
        if got and expected:
            entry = committed.book.entries[id]
            require(got == expected, entry, "ended by", got, "instead of", expected)


def ends_in_time(committed: Committed, id: RequestId) -> bool:
    """Whether it ended if it had to, and only then."""
    return (id in told(committed)) == (id in committed.expected)


@check("SCH-9", Committed)
def preempted_requests_end_as_if_they_were_not(committed: Committed, require: Require) -> None:
    """Outputs of before the preemption count, and count once."""
    for id in sampling(committed):
        entry = committed.book.entries[id]
        if entry.num_preemptions and not entry.is_cut:
            k, ended = len(entry.completion), id in told(committed)
            require(ends_in_time(committed, id), entry, f"has {k} of {entry.room}; ended:", ended)


@check("SCH-14", Committed, "chunked_prefill")
def chunked_requests_end_as_if_they_were_not(committed: Committed, require: Require) -> None:
    for id in sampling(committed):
        entry = committed.book.entries[id]
        if entry.chunked and not entry.is_cut:
            k, ended = len(entry.completion), id in told(committed)
            require(ends_in_time(committed, id), entry, f"has {k} of {entry.room}; ended:", ended)


@check("SCH-12b", Planned)
def ended_requests_have_no_rows(planned: Planned, require: Require) -> None:
    _no_rows_of(planned, require, ("stop", "length"))


@check("SCH-14", Committed, "chunked_prefill")
def nothing_ends_before_its_last_chunk(committed: Committed, require: Require) -> None:
    for seating in committed.flight.seatings:
        entry = seating.entry
        if not (seating.samples or entry.aborting or entry.open_end or entry.reason):
            require(entry.id not in told(committed), entry, "ended by a chunk of its prompt")


# ---- abort, and steps that raise -----------------------------------------------------------------


@check("SCH-13", Aborted, "abort")
def abort_says_whether_it_took(aborted: Aborted, require: Require) -> None:
    require(aborted.took is aborted.alive, f"abort of r{aborted.request} says", aborted.took)


@check("SCH-13", Planned, "abort")
def aborted_requests_have_no_rows(planned: Planned, require: Require) -> None:
    _no_rows_of(planned, require, ("abort",))


@check("SCH-13", Committed, "abort")
def abort_takes_effect_at_the_commit(committed: Committed, require: Require) -> None:
    for id, reason in committed.expected.items():
        if reason == "abort":
            got = told(committed).get(id, "abort")
            require(got == "abort", committed.book.entries[id], "was aborted, ended by", got)


@check("SCH-13", State, "abort", "pool")
def abort_frees_all_once(state: State, require: Require) -> None:
    if state.call == "abort" and state.settled and state.pool is not None:
        counts, held = used(state.pool), dict(+state.book.blocks.held)
        require(counts == held, "reference counts", counts, "live tables name", held)


@check("SCH-13", Crashed, "abort")
def abort_never_raises(crashed: Crashed, require: Require) -> None:
    if crashed.call == "abort":
        require(False, "abort raises:", crashed.summary)


@check("SCH-15", Failed, "fail_step")
def failed_steps_end_with_an_error(failed: Failed, require: Require) -> None:
    ids = [finished.id for finished in failed.ended]
    requests = {seating.entry.id.request for f in failed.flights for seating in f.seatings}
    require(len(set(ids)) == len(ids), "ended twice:", names_of(ids))
    for finished in failed.ended:
        entry = failed.book.entries.get(finished.id)
        require(finished.id in failed.live, name_of(finished.id), "ended, and was not alive")
        require(finished.id.request in requests, entry, "ended, and was not in the step")
        aborting = entry is not None and entry.aborting
        allowed = ("error", "abort") if aborting else ("error",)
        require(finished.reason in allowed, entry, "ended by", finished.reason)


@check("SCH-15", Executed, "fail_step")
def restored_requests_compute_it_again(executed: Executed, require: Require) -> None:
    """What a failed step was to compute is not counted as computed."""
    for seating, reading in zip(executed.flight.seatings, executed.readings, strict=True):
        if not seating.kept and not seating.is_admission:
            wrong = [m for m in reading.misreads if m.position < seating.row.start]
            require(not wrong, seating.entry, "goes on, and at", *wrong[:1])


@check("SCH-15", Drained, "fail_step")
def engine_goes_on(drained: Drained, require: Require) -> None:
    stuck = drained.book.is_stunned and drained.left
    require(not stuck, "nothing is planned since a step raised;", drained.left, "wait")


@check("SCH-15", State, "fail_step", "pool")
def failed_steps_conserve_blocks(state: State, require: Require) -> None:
    if state.call == "fail_step" and state.settled and state.pool is not None:
        counts, held = used(state.pool), dict(+state.book.blocks.held)
        require(counts == held, "reference counts", counts, "live tables name", held)


@check("SCH-15", Planned, "fail_step")
def failed_requests_have_no_rows(planned: Planned, require: Require) -> None:
    _no_rows_of(planned, require, ("error",))


@check("SCH-15", Crashed, "fail_step")
def engine_survives_a_failed_step(crashed: Crashed, require: Require) -> None:
    if crashed.call == "fail_step":
        require(False, "fail_step raises:", crashed.summary)


def _no_rows_of(planned: Planned, require: Require, reasons: tuple[str, ...]) -> None:
    entries = planned.book.entries
    if any(entry.reason in reasons for entry in entries.values()):
        strangers = [entries[row.id] for row in planned.flight.strangers if row.id in entries]
        late = [entry for entry in strangers if entry.reason in reasons]
        require(not late, "they ended, and have rows:", late)
