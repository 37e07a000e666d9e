"""Scheduler and blocks at the core door: admission, batches, preemption, ends of requests."""

from __future__ import annotations

from nanovllm.conformance.protocol import CoreDoor, EngineFault, Refused, RequestOptions
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import Track, small, span
from nanovllm.conformance.verdicts import Evaluations


def expect_refused(
    bench: Bench,
    spec_id: str,
    prompt: list[int],
    max_tokens: object,
    *numbers: int,
    options: RequestOptions | None = None,
) -> None:
    """The engine refuses it when it is added; its message names one of `numbers` at least."""
    what = f"a prompt of {len(prompt)} tokens, max_tokens={max_tokens!r}"
    try:
        bench.add(prompt, max_tokens, options=options)  # type: ignore[arg-type]
    except Refused as refusal:
        named = not numbers or any(str(number) in str(refusal) for number in numbers)
        bench.expect(named, spec_id, what, f"is refused, and none of {numbers} named: {refusal}")
    else:
        bench.expect(False, spec_id, what, "is not refused")


# ---- limits ----------------------------------------------------------------------------------


@scenario("SCH-5")
def idle_engine_returns_an_empty_plan(door: CoreDoor, seen: Evaluations) -> None:
    """Before the first request, and after the last."""
    bench = Bench(door, small(), seen)
    for _ in range(2):
        rows = bench.schedule().rows
        seen.require(not rows, "SCH-5", "an idle engine plans", rows)
        bench.run(span(1, 5))


@scenario("SCH-7a")
def what_never_fits_is_refused_and_others_go_on(door: CoreDoor, seen: Evaluations) -> None:
    """An empty prompt; one of max_model_len and beyond; one that the pool cannot hold."""
    bench = Bench(door, small(num_blocks=4, max_model_len=20), seen)
    good = bench.add(span(1, 5), 3)
    bench.step()
    expect_refused(bench, "SCH-7a", [], 1)
    for p in (20, 21):
        expect_refused(bench, "SCH-7a", [1] * p, 1, p, 20, 16)
    expect_refused(bench, "SCH-7a", [1] * 17, 1, 17, 16)
    bench.drain()
    bench.expect_complete(good, "SCH-7a")


@scenario("SCH-7b")
def max_tokens_that_is_no_count_is_refused(door: CoreDoor, seen: Evaluations) -> None:
    """0, -1 and 1.5 tokens."""
    bench = Bench(door, small(), seen)
    for max_tokens in (0, -1, 1.5):
        expect_refused(bench, "SCH-7b", [1, 2, 3], max_tokens)
    bench.expect_complete(bench.run([1, 2, 3]), "SCH-7b")


@scenario("SCH-2")
def budget_below_the_seats_is_refused(door: CoreDoor, seen: Evaluations) -> None:
    """A step could not give each of 4 requests its token out of a budget of 3."""
    try:
        Bench(door, small(max_num_seqs=4, max_num_batched_tokens=3), seen)
    except (Refused, EngineFault):
        seen.count("SCH-2")
    else:
        seen.require(False, "SCH-2", "max_num_batched_tokens=3 and max_num_seqs=4 are accepted")


@scenario("SCH-2", "SCH-4", "KV-7", "SCH-9")
def plans_keep_within_the_budget(door: CoreDoor, seen: Evaluations) -> None:
    """Three prompts of five tokens under a budget of seven."""
    bench = Bench(door, small(max_num_seqs=3, max_num_batched_tokens=7), seen)
    tracks = [bench.add([i] * 5, 3) for i in (1, 2, 3)]
    for plan in bench.drain():
        total = sum(row.count for row in plan.rows)
        seen.require(total <= 7, "SCH-2", total, "tokens in a plan, the budget is 7")
    for track in tracks:
        bench.expect_complete(track, "SCH-9")


@scenario("SCH-2", needs=("prefix_cache", "chunked_prefill"), level="should")
def cached_tokens_cost_no_budget(door: CoreDoor, seen: Evaluations) -> None:
    """Two prompts of nine tokens, eight of them cached, share a step of four."""
    bench = Bench(door, small(max_num_seqs=2, max_num_batched_tokens=4), seen)
    bench.run(span(1, 9))
    bench.add([*span(1, 8), 20], 1)
    bench.add([*span(1, 8), 21], 1)
    num_rows = len(bench.step().rows)
    seen.require(num_rows == 2, "SCH-2", num_rows, "of two cached prompts are in the plan")
    bench.drain()


@scenario("SCH-3")
def seats_bound_the_running_set(door: CoreDoor, seen: Evaluations) -> None:
    """Six requests, two seats."""
    bench = Bench(door, small(num_blocks=32, max_num_seqs=2), seen)
    for i in range(6):
        bench.add([i + 1], 8)
    for _ in bench.steps():
        seated = [track for track in bench.live if track.is_seated]
        seen.require(len(seated) <= 2, "SCH-3", len(seated), "requests run in two seats")


@scenario("SCH-14", lacks=("chunked_prefill",))
def what_could_not_return_is_refused(door: CoreDoor, seen: Evaluations) -> None:
    """Budget 8, no chunks: 6 tokens and 4 outputs could not be computed again in one step.

    Who accepts them all the same has to end them, preempted or not.
    """
    bench = Bench(door, small(num_blocks=4, max_num_batched_tokens=8), seen)
    tracks = []
    for token in (1, 2):
        try:
            tracks.append(bench.add([token] * 6, 4))
        except Refused:
            seen.count("SCH-14")
    bench.drain("SCH-14")
    tracks.append(bench.run([1] * 6, max_tokens=3))
    for track in tracks:
        bench.expect_complete(track, "SCH-14")


# ---- batches ---------------------------------------------------------------------------------


@scenario("SCH-1")
def first_come_first_served(door: CoreDoor, seen: Evaluations) -> None:
    """One seat: four prompts of different lengths begin in order of arrival."""
    bench = Bench(door, small(max_num_seqs=1), seen)
    tracks = [bench.add([token] * p, 2) for token, p in ((1, 9), (2, 1), (3, 6), (4, 2))]
    bench.drain()
    rows = [row.id for plan in bench.plans for row in plan.rows]
    begun = list(dict.fromkeys(rows))
    expected = [track.id for track in tracks]
    seen.require(begun == expected, "SCH-1", f"begun in the order {begun}, arrived {expected}")


@scenario("SCH-16", "SCH-9")
def seat_of_a_finished_request_serves_the_next_schedule(door: CoreDoor, seen: Evaluations) -> None:
    """Two seats: the third request joins as soon as the shorter one ends."""
    bench = Bench(door, small(max_num_seqs=2), seen)
    tracks = bench.add([1] * 5, 1), bench.add([2] * 5, 16), bench.add([3] * 5, 1)
    _joins_after_the_first_end(bench, *tracks)


@scenario("SCH-16", "SCH-9")
def blocks_of_a_finished_request_serve_the_next_schedule(door: CoreDoor, seen: Evaluations) -> None:
    """Five blocks: the third request, of two, joins as soon as the first gives back its own."""
    bench = Bench(door, small(num_blocks=5), seen)
    tracks = bench.add([1] * 5, 1), bench.add([2] * 5, 7), bench.add([3] * 5, 1)
    _joins_after_the_first_end(bench, *tracks)


def _joins_after_the_first_end(bench: Bench, short: Track, long: Track, third: Track) -> None:
    bench.until(lambda: short.reason)
    both_ran = bool(long.rows)  # else the seat is not the third one's
    for _ in range(1 + bench.ahead):
        bench.step()
    if both_ran:
        bench.expect(third.rows, "SCH-16", third, "has no row in the schedule after", short)
        bench.expect(long.reason is None, "SCH-16", third, "waited for", long)
    bench.drain()
    for track in (short, long, third):
        bench.expect_complete(track, "SCH-9")


@scenario("SCH-14", "KV-5", "SCH-4", needs=("chunked_prefill",))
def every_chunking_gives_the_same_output(door: CoreDoor, seen: Evaluations) -> None:
    """A prompt of 15 tokens under budgets of 1 to 16."""
    for budget in range(1, 17):
        bench = Bench(door, small(max_num_seqs=1, max_num_batched_tokens=budget), seen)
        track = bench.run(span(1, 15), max_tokens=3)
        bench.expect_complete(track, "SCH-14")


@scenario("SCH-6", needs=("chunked_prefill",))
def preempted_request_that_outgrew_the_budget_returns(door: CoreDoor, seen: Evaluations) -> None:
    """Two prompts of eight with eight outputs, five blocks, a budget of eight."""
    bench = Bench(door, small(num_blocks=5, max_num_batched_tokens=8), seen)
    tracks = [bench.add([1] * 8, 8), bench.add([2] * 8, 8)]
    bench.drain()
    for track in tracks:
        bench.expect_complete(track, "SCH-6")


@scenario("SCH-6")
def endless_arrivals_do_not_starve_a_running_request(door: CoreDoor, seen: Evaluations) -> None:
    """It has begun; two prompts arrive before every step; it has ended 200 steps later."""
    bench = Bench(door, small(num_blocks=64, max_num_batched_tokens=16), seen)
    track = bench.add([1] * 5, 5)
    bench.until(lambda: track.rows)
    for i in range(200):
        for token in (2, 3):
            bench.add([token, i % 90, *span(1, 9)], 1)
        bench.step()
        if track.reason:
            break
    bench.expect(track.reason, "SCH-6", track, "is not done after 200 steps")


# ---- preemption ------------------------------------------------------------------------------


@scenario("SCH-8", "SCH-9")
def preempted_request_gives_way_and_loses_nothing(door: CoreDoor, seen: Evaluations) -> None:
    """Three blocks for two requests that grow to two each."""
    bench = Bench(door, small(num_blocks=3), seen)
    old, new = bench.add([1] * 3, 6), bench.add([2] * 3, 6)
    running: list[Track] = []
    for plan in bench.steps():
        planned = {row.id for row in plan.rows}
        for id in plan.preempted:
            victim = bench.tracks[id]
            bench.expect(id not in planned, "SCH-8", victim, "lost its blocks and has a row")
            bench.expect(victim in running[1:], "SCH-8", victim, "gave way; running were", running)
        running = [track for track in (old, new) if track.is_seated]
    for track in (old, new):
        bench.expect_complete(track, "SCH-9")


@scenario("SCH-8", "SCH-9")
def lone_request_grows_through_the_whole_pool(door: CoreDoor, seen: Evaluations) -> None:
    """p=5 and k=8 fill three blocks of four to the last slot; nobody is preempted (BLK-6)."""
    bench = Bench(door, small(num_blocks=3), seen)
    track = bench.run([1] * 5, max_tokens=8)
    seen.require(track.num_preempted == 0, "SCH-8", track, "was preempted while it ran alone")
    bench.expect_complete(track, "SCH-9")


@scenario("SCH-10", level="should")
def preempted_request_runs_before_a_later_arrival(door: CoreDoor, seen: Evaluations) -> None:
    """A third request arrives right after the preemption."""
    bench = Bench(door, small(num_blocks=3), seen)
    tracks = bench.add([1] * 3, 6), bench.add([2] * 3, 6)
    bench.until(lambda: any(track.num_preempted for track in tracks))
    for victim in (track for track in tracks if track.num_preempted):
        later = bench.add([3], 1)
        for _ in bench.steps():
            first = len(victim.admissions) > 1 or not later.rows
            bench.expect(first, "SCH-10", later, "runs before", victim, "returns")


SCENARIOS = scenarios_of(globals())
