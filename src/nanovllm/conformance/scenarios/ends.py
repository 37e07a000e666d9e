"""How requests end at the core door: tokens, lengths, aborts, failed steps; and several samples."""

from __future__ import annotations

from itertools import combinations

from nanovllm.conformance.protocol import CoreDoor, RequestId, RequestOptions
from nanovllm.conformance.scenarios.core import expect_refused
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import Track, small, span
from nanovllm.conformance.verdicts import Evaluations

EOS = 90
STOP = 91


def _expect_end(
    bench: Bench, track: Track, spec_id: str, num_outputs: int, reason: str, reason_id: str
) -> None:
    n = len(track.completion)
    bench.expect(n == num_outputs, spec_id, track, f"ended after {n}, not {num_outputs}")
    bench.expect(track.reason == reason, reason_id, track, f"ended by {track.reason}, not {reason}")


@scenario("SCH-12a", "SCH-12d")
def eos_ends_a_request_and_counts(door: CoreDoor, seen: Evaluations) -> None:
    """The first or the second output is the eos."""
    for forced in ((EOS,), (5, EOS)):
        _expect_eos_to_end(door, seen, forced, EOS)


@scenario("SCH-12a", "SCH-12d")
def each_of_several_eos_ids_ends_a_request(door: CoreDoor, seen: Evaluations) -> None:
    """The second output is one of two."""
    for eos in (EOS, EOS + 1):
        _expect_eos_to_end(door, seen, (5, eos), EOS, EOS + 1)


def _expect_eos_to_end(
    door: CoreDoor, seen: Evaluations, forced: tuple[int, ...], *ids: int
) -> None:
    bench = Bench(door, small(eos_token_ids=ids), seen)
    track = bench.add([1, 2], 5, forced=forced)
    bench.drain()
    _expect_end(bench, track, "SCH-12a", len(forced), "stop", "SCH-12d")


@scenario("SCH-12a", "SCH-12d")
def eos_is_ignored_on_demand(door: CoreDoor, seen: Evaluations) -> None:
    """`ignore_eos`: the request goes on to its length."""
    bench = Bench(door, small(eos_token_ids=(EOS,)), seen)
    options = RequestOptions(ignore_eos=True)
    track = bench.add([1, 2], 5, forced=(5, EOS, EOS), options=options)
    bench.drain()
    _expect_end(bench, track, "SCH-12a", 5, "length", "SCH-12d")


@scenario("SCH-12b", "SCH-12d")
def length_ends_a_request(door: CoreDoor, seen: Evaluations) -> None:
    """Exactly max_tokens outputs, in a batch of three lengths."""
    bench = Bench(door, small(), seen)
    tracks = [bench.add([i] * 3, i) for i in (1, 2, 5)]
    bench.drain()
    for track in tracks:
        _expect_end(bench, track, "SCH-12b", track.max_tokens, "length", "SCH-12d")


@scenario("SCH-12d", "SCH-12a")
def stop_wins_over_length(door: CoreDoor, seen: Evaluations) -> None:
    """The last output that is allowed is an eos."""
    bench = Bench(door, small(eos_token_ids=(EOS,)), seen)
    track = bench.add([1, 2], 3, forced=(5, 6, EOS))
    bench.drain()
    _expect_end(bench, track, "SCH-12a", 3, "stop", "SCH-12d")


@scenario("SCH-12c", "SCH-12d", needs=("stop",))
def stop_id_ends_its_request_alone(door: CoreDoor, seen: Evaluations) -> None:
    """Two requests draw the same token; it ends the one that asked for it."""
    bench = Bench(door, small(), seen)
    options = RequestOptions(stop_token_ids=(STOP,))
    stopped = bench.add([1, 2], 5, forced=(5, STOP), options=options)
    other = bench.add([3, 4], 5, forced=(5, STOP))
    bench.drain()
    _expect_end(bench, stopped, "SCH-12c", 2, "stop", "SCH-12d")
    _expect_end(bench, other, "SCH-12c", 5, "length", "SCH-12d")


@scenario("SCH-12c", "SCH-12d", needs=("stop",))
def stop_id_ends_a_request_that_ignores_eos(door: CoreDoor, seen: Evaluations) -> None:
    """`ignore_eos` is about eos ids only; a stop id may be one of them."""
    for stop in (STOP, EOS):
        bench = Bench(door, small(eos_token_ids=(EOS,)), seen)
        options = RequestOptions(stop_token_ids=(stop,), ignore_eos=True)
        track = bench.add([1, 2], 5, forced=(5, stop), options=options)
        bench.drain()
        _expect_end(bench, track, "SCH-12c", 2, "stop", "SCH-12d")


@scenario("STP-2", "SCH-12d", needs=("min_tokens",))
def more_min_tokens_than_max_tokens_are_refused(door: CoreDoor, seen: Evaluations) -> None:
    """At least four of at most three."""
    bench = Bench(door, small(eos_token_ids=(EOS,)), seen)
    expect_refused(bench, "STP-2", [1, 2], 3, options=RequestOptions(min_tokens=4))
    track = bench.add([1, 2], 5, forced=(5, 6, EOS), options=RequestOptions(min_tokens=2))
    bench.drain()
    _expect_end(bench, track, "STP-2", 3, "stop", "SCH-12d")


# ---- aborts ----------------------------------------------------------------------------------


@scenario("SCH-13", needs=("abort",))
def abort_frees_all_once_and_says_so(door: CoreDoor, seen: Evaluations) -> None:
    """One running, one waiting; again; one that never was; one that has ended."""
    bench = Bench(door, small(num_blocks=4, max_num_seqs=1), seen)
    running, waiting = bench.add([1] * 6, 8), bench.add([2] * 6, 8)
    bench.step()
    for track in (waiting, running):
        seen.require(bench.abort(track), "SCH-13", "abort of", track, "says that it did nothing")
        track.reason, track.table = "abort", ()
    for request in (0, 1, 77):
        took = door.abort(request)
        seen.require(not took, "SCH-13", f"abort of request {request} says that it took")
    whole = bench.run([3] * 16, spec_id="SCH-13")
    bench.expect_complete(whole, "SCH-13")
    seen.require(not bench.abort(whole), "SCH-13", "abort of", whole, "says that it took")


@scenario("SCH-13", "SCH-12d", needs=("abort",))
def abort_in_flight_takes_effect_at_the_commit(door: CoreDoor, seen: Evaluations) -> None:
    """The plan is executed all the same, and its other request gets its token."""
    bench = Bench(door, small(), seen)
    aborted, other = bench.add([1] * 6, 4), bench.add([2] * 6, 4)
    plan = bench.schedule()
    seen.require(bench.abort(aborted), "SCH-13", "abort says that it did nothing")
    if plan.rows:
        bench.commit(plan)
    aborted.reason, aborted.table = aborted.reason or "abort", ()
    seen.require(aborted.reason == "abort", "SCH-12d", aborted, "ended by", aborted.reason)
    bench.drain()
    bench.expect_complete(other, "SCH-13")
    late = [row for plan in bench.plans[1 + bench.ahead :] for row in plan.rows]
    ran = any(row.id == aborted.id for row in late)
    seen.require(not ran, "SCH-13", aborted, "still runs")


@scenario("PFX-4", needs=("abort", "prefix_cache"))
def prompt_of_an_aborted_request_can_be_asked_again(door: CoreDoor, seen: Evaluations) -> None:
    """Aborted before any of it was computed, and after."""
    bench = Bench(door, small(), seen)
    for steps in range(3):
        aborted = bench.add(span(1, 9), 8)
        for _ in range(steps):
            bench.step()
        bench.abort(aborted)
        aborted.reason, aborted.table = "abort", ()
        bench.expect_complete(bench.run([*span(1, 8), 20 + steps]), "PFX-4")


# ---- failed steps ----------------------------------------------------------------------------


@scenario("SCH-15", needs=("fail_step",))
def failed_step_ends_or_restores_its_requests(door: CoreDoor, seen: Evaluations) -> None:
    """Two of three are in the step that raises; afterwards the whole pool can be used."""
    bench = Bench(door, small(num_blocks=4, max_num_seqs=2), seen)
    tracks = [bench.add([i] * 6, 3) for i in (1, 2, 3)]
    bench.step()
    plan = bench.schedule()
    inside = {row.id for row in plan.rows}
    bench.fail_step(plan)
    bench.drain("SCH-15")
    for track in tracks:
        if track.reason == "error":
            seen.require(track.id in inside, "SCH-15", track, "was not in the step that raised")
        else:
            bench.expect_complete(track, "SCH-15")
    bench.expect_complete(bench.run([4] * 16, spec_id="SCH-15"), "SCH-15")


@scenario("SCH-15", needs=("fail_step",))
def engine_survives_steps_that_fail_in_a_row(door: CoreDoor, seen: Evaluations) -> None:
    """Prefill, then decode, then prefill again; each time the next request is served."""
    bench = Bench(door, small(num_blocks=4), seen)
    for steps in (0, 1, 0):
        track = bench.add([1 + steps] * 7, 6)
        for _ in range(steps):
            bench.step()
        if (plan := bench.schedule()).rows:
            bench.fail_step(plan)
        bench.drain("SCH-15")
        if track.reason != "error":
            bench.expect_complete(track, "SCH-15")
    bench.expect_complete(bench.run([9] * 16, spec_id="SCH-15"), "SCH-15")


# ---- several samples -------------------------------------------------------------------------


def _samples(bench: Bench, first: Track, n: int) -> list[Track]:
    return [bench.tracks[RequestId(first.id.request, i)] for i in range(n)]


@scenario("BLK-8", needs=("n",), lacks=("cow",))
def samples_share_no_block_that_is_not_full(door: CoreDoor, seen: Evaluations) -> None:
    """p=6, n=3, bs=4: each sample has a last block of its own after every commit."""
    bench = Bench(door, small(), seen)
    tracks = _samples(bench, bench.add(span(1, 6), 7, options=RequestOptions(n=3)), 3)
    for _ in bench.steps():
        for a, b in combinations([track for track in tracks if track.is_seated], 2):
            for block in set(a.table) & set(b.table):
                end = 4 * (1 + a.table.index(block))
                full = end <= min(a.rows[-1].end, b.rows[-1].end)
                seen.require(full, "BLK-8", f"block {block} is shared by {a} and {b}, and not full")
    for track in tracks:
        bench.expect_alone(track, "BLK-8")


@scenario("FRK-2", "FRK-1", needs=("n",))
def samples_share_the_prompts_full_blocks(door: CoreDoor, seen: Evaluations) -> None:
    """p=9, n=3: two blocks are shared, and their eight tokens are computed once."""
    bench = Bench(door, small(), seen)
    tracks = _samples(bench, bench.add(span(1, 9), 6, options=RequestOptions(n=3)), 3)
    bench.drain()
    shared = {row.block_table[:2] for track in tracks for row in track.rows if row.end > 8}
    seen.require(len(shared) == 1, "FRK-2", "the prompt lies in", sorted(shared))
    rows = [row for track in tracks for row in track.rows]
    computed = sum(max(0, min(row.end, 8) - row.start) for row in rows)
    seen.require(computed == 8, "FRK-2", computed, "tokens computed for two shared blocks")
    for track in tracks:
        bench.expect_complete(track, "FRK-1")


@scenario("FRK-3", "SCH-3", needs=("n",))
def more_samples_than_seats_end(door: CoreDoor, seen: Evaluations) -> None:
    """n=5 in two seats."""
    bench = Bench(door, small(max_num_seqs=2, num_blocks=32), seen)
    tracks = _samples(bench, bench.add(span(1, 5), 4, options=RequestOptions(n=5)), 5)
    for _ in bench.steps("FRK-3"):
        seated = sum(track.is_seated for track in tracks)
        seen.require(seated <= 2, "SCH-3", seated, "samples run in two seats")
    for track in tracks:
        bench.expect_complete(track, "FRK-3")


@scenario("FRK-3", needs=("n", "abort"))
def abort_drops_all_samples(door: CoreDoor, seen: Evaluations) -> None:
    """Afterwards the whole pool can be used."""
    for steps in range(3):
        bench = Bench(door, small(num_blocks=6, max_num_seqs=2), seen)
        first = bench.add(span(1, 5), 8, options=RequestOptions(n=3))
        for _ in range(steps):
            bench.step()
        seen.require(bench.abort(first), "FRK-3", "abort says that it did nothing")
        for track in _samples(bench, first, 3):
            track.reason, track.table = "abort", ()
        bench.expect_complete(bench.run([9] * 24, spec_id="FRK-3"), "FRK-3")


SCENARIOS = scenarios_of(globals())
