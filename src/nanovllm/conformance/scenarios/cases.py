"""Cases from public reports that show at the core door, named after their numbers.

`cases.md` of the specification has the report, the cause, and the expectation of each.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import combinations

from nanovllm.conformance.protocol import CoreDoor, Plan, Refused, RequestOptions, World
from nanovllm.conformance.scenarios.core import expect_refused
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import Track, small, span
from nanovllm.conformance.verdicts import Evaluations

CACHE = ("prefix_cache",)
POOL = ("prefix_cache", "pool")


@scenario("BLK-1", "PFX-7", needs=POOL)
def b03_accounting_sums_to_the_pool(door: CoreDoor, seen: Evaluations) -> None:
    """Two prompts with a common block leave three cached blocks, and all of the pool free."""
    bench = Bench(door, small(num_blocks=8), seen)
    bench.run(span(1, 8))
    bench.run([1, 2, 3, 4, 9, 10, 11, 12])
    pool = door.pool()
    published = {entry.block for entry in pool.published}
    seen.require(len(published) == 3, "PFX-7", f"published {pool.published}, expected 3 blocks")
    used = [b for b, count in pool.ref_counts.items() if count and b not in pool.reserved]
    seen.require(not used, "BLK-1", f"blocks {used} are referenced by nobody that lives")
    total = len(set(pool.free)), len(pool.free) + len(pool.reserved)
    seen.require(total == (8 - len(pool.reserved), 8), "BLK-1", f"free {pool.free} of 8")


@scenario("BLK-5")
def b06_blocks_at_the_boundary(door: CoreDoor, seen: Evaluations) -> None:
    """bs=4: blocks held in the plan whose commit yields output 1, 2, 3, for p = 3, 4, 5."""
    for p, expected in ((3, (1, 1, 2)), (4, (1, 2, 2)), (5, (2, 2, 2))):
        bench = Bench(door, small(), seen)
        track = bench.add([1] * p, 4)
        bench.drain(look=partial(_expect_held, bench, track, expected))


def _expect_held(bench: Bench, track: Track, expected: tuple[int, ...], plan: Plan) -> None:
    """`expected`: blocks for the first outputs."""
    output = len(track.completion)
    for row in plan.rows:
        if row.end == len(track.tokens) and output < len(expected):
            held, wanted = len(row.block_table), expected[output]
            good = wanted <= held <= wanted + bench.ahead
            label = f"p={len(track.prompt)}: {held} blocks for output {output + 1}, not {wanted}"
            bench.expect(good, "BLK-5", label)


@scenario("BLK-5")
def b06_prompts_of_whole_blocks_run(door: CoreDoor, seen: Evaluations) -> None:
    """p = bs and p = 2 bs raise nothing."""
    for p in (4, 8):
        bench = Bench(door, small(), seen)
        bench.expect_complete(bench.run([1] * p, max_tokens=4), "BLK-5")


@scenario("PFX-6", "PFX-11", "PFX-12", needs=CACHE)
def b12_whole_prompt_in_the_cache(door: CoreDoor, seen: Evaluations) -> None:
    """[1..8] twice: the second computes at least a token and at most a block; [1..12] hits 8."""
    bench = Bench(door, small(), seen)
    first, second, third = bench.run(span(1, 8)), bench.run(span(1, 8)), bench.run(span(1, 12))
    seen.require(4 <= second.cached <= 7, "PFX-6", f"{second.cached} cached tokens, not 4 to 7")
    same = second.completion == first.completion
    seen.require(same, "PFX-12", f"warm {second.completion}, cold {first.completion}")
    seen.require(third.cached == 8, "PFX-11", f"{third.cached} cached tokens, expected 8")
    for track in (first, second, third):
        bench.expect_complete(track, "PFX-12")


@scenario("PFX-16", "KV-7", "SCH-9", needs=CACHE)
def b13_work_is_counted_after_the_lookup(door: CoreDoor, seen: Evaluations) -> None:
    """Preempted with 10 tokens known and two full blocks resident, it computes positions 8, 9."""
    bench = Bench(door, small(num_blocks=5), seen)
    bench.add([50] * 8, 2)
    track = bench.add(span(1, 9), 3)
    bench.drain()
    for admission in track.admissions[1:]:
        if admission.known == 10 and admission.resident == 2:
            row = admission.row
            got = row.start, row.count
            seen.require(got == (8, 2), "PFX-16", f"start and count are {got}, expected (8, 2)")
    bench.expect_complete(track, "SCH-9")


@scenario("PFX-2", "PFX-12", needs=CACHE)
def b14_reused_block_leaves_no_stale_entry(door: CoreDoor, seen: Evaluations) -> None:
    """N=2: X, then Y in the same two blocks, then X again, which finds nothing."""
    bench = Bench(door, small(num_blocks=2), seen)
    bench.run(span(1, 8))
    bench.run(span(11, 18))
    again = bench.run(span(1, 8))
    seen.require(again.cached == 0, "PFX-2", f"{again.cached} cached tokens, expected 0")
    bench.expect_complete(again, "PFX-12")


@scenario("PFX-7", needs=POOL)
def b14_map_does_not_grow_with_the_number_of_prompts(door: CoreDoor, seen: Evaluations) -> None:
    """N=2: at most two entries, however many random prompts have gone.

    The report says 10,000; a map that grows shows it after the first few.
    """
    door.reset(small(num_blocks=2, max_num_seqs=2))
    draw, ahead = random.Random(14), door.hello().ahead
    for i in range(0, 2_000, 2):
        for request in (i, i + 1):
            door.add(request, [draw.randrange(9) for _ in range(4)], 1, RequestOptions())
        for _ in range(1 + ahead):
            if (plan := door.schedule()).rows:
                door.commit(plan.step, {row.id: 0 for row in plan.rows})
        if i < 10 or i % 100 == 0:
            size = len(door.pool().published)
            seen.require(size <= 2, "PFX-7", f"{size} entries for 2 blocks after {i + 2} prompts")


@scenario("PFX-2", "PFX-12", needs=CACHE)
def b16_cached_count_of_a_failed_admission_is_forgotten(door: CoreDoor, seen: Evaluations) -> None:
    """N=4: W waits while R evicts the block that W would have hit."""
    bench = Bench(door, small(num_blocks=4, max_num_batched_tokens=16), seen)
    bench.run(span(1, 4))
    running = bench.add(span(21, 28), 6)
    bench.step()
    waiting = bench.add(span(1, 16), 1)
    bench.until(lambda: running.reason)
    waited = not waiting.rows and not running.num_preempted
    bench.drain()
    if waited:  # else it was admitted before all its tokens fitted, which no must forbids
        got = waiting.cached, sum(row.count for row in waiting.rows)
        seen.require(got == (0, 16), "PFX-2", f"cached and computed are {got}, expected (0, 16)")
    for track in (running, waiting):
        bench.expect_complete(track, "PFX-12")


def _collisions(door: CoreDoor, seen: Evaluations, world: World) -> None:
    bench = Bench(door, world, seen)
    draw = random.Random(17)
    for _ in range(20):
        start = [draw.choice((1, 2))] * 4
        bench.add(start + [draw.choice((1, 2)) for _ in range(draw.randint(1, 8))], 4)
        bench.step()
        for a, b in combinations([track for track in bench.live if track.is_seated], 2):
            _expect_shared_blocks_equal(bench, a, b)
    bench.drain()
    for track in bench.tracks.values():
        bench.expect_complete(track, "PFX-2")


def _expect_shared_blocks_equal(bench: Bench, a: Track, b: Track) -> None:
    for block in set(a.table) & set(b.table):
        i, j = a.table.index(block), b.table.index(block)
        end = min((i + 1) * bench.world.block_size, len(a.tokens), len(b.tokens))
        same = i == j and a.tokens[:end] == b.tokens[:end]
        bench.expect(same, "PFX-2", a, "and", b, f"share block {block}")


def _equal_block_behind_other_ancestors(door: CoreDoor, seen: Evaluations, world: World) -> None:
    bench = Bench(door, world, seen)
    bench.run([1, 2, 3, 4, 5, 6, 7, 8, 0])
    second = bench.run([9, 9, 9, 9, 5, 6, 7, 8, 0])
    seen.require(second.cached == 0, "PFX-2", f"{second.cached} cached tokens, expected 0")
    bench.expect_complete(second, "PFX-2")


@scenario("PFX-2", needs=("prefix_cache", "hash_override"))
def b17_constant_hash_shares_nothing_wrong(door: CoreDoor, seen: Evaluations) -> None:
    """All blocks collide: outputs and shared blocks are right all the same."""
    _collisions(door, seen, small(num_blocks=24, hash="constant"))


@scenario("PFX-2", needs=("prefix_cache", "hash_override"))
def b17_one_bit_hash_shares_nothing_wrong(door: CoreDoor, seen: Evaluations) -> None:
    """Half of the blocks collide: outputs and shared blocks are right all the same."""
    _collisions(door, seen, small(num_blocks=24, hash="1bit"))


@scenario("PFX-2", needs=CACHE)
def b18_equal_block_behind_other_ancestors(door: CoreDoor, seen: Evaluations) -> None:
    """[1..8, 0], then [9, 9, 9, 9, 5..8, 0]: its second block is equal, and no hit."""
    _equal_block_behind_other_ancestors(door, seen, small(num_blocks=8))


@scenario("PFX-2", needs=("prefix_cache", "hash_override"))
def b18_under_a_constant_hash(door: CoreDoor, seen: Evaluations) -> None:
    """The same where every block collides, so that the parents must be compared too."""
    _equal_block_behind_other_ancestors(door, seen, small(num_blocks=8, hash="constant"))


@scenario("PFX-9", needs=CACHE)
def b21_deepest_block_is_reused_first(door: CoreDoor, seen: Evaluations) -> None:
    """N=3: one block of A's three is taken; eight tokens of A are still there."""
    bench = Bench(door, small(num_blocks=3), seen)
    bench.run(span(1, 12))
    bench.run(span(21, 24))
    again = bench.run(span(1, 12))
    seen.require(again.cached == 8, "PFX-9", f"{again.cached} cached tokens, expected 8")


@scenario("PFX-9", needs=CACHE)
def b21_blocks_of_the_older_request_go_first(door: CoreDoor, seen: Evaluations) -> None:
    """N=4: of two prompts of two blocks the older one's are taken by a third."""
    bench = Bench(door, small(num_blocks=4), seen)
    for first in (1, 11, 21):
        bench.run(span(first, first + 7))
    newer = bench.run([*span(11, 18), 9])
    seen.require(newer.cached == 8, "PFX-9", f"{newer.cached} cached tokens, expected 8")


@scenario("PFX-10", "PFX-12", needs=CACHE)
def b27_cached_blocks_do_not_block_admission(door: CoreDoor, seen: Evaluations) -> None:
    """N=8, all cached and unreferenced: the fifth prompt is admitted by the next schedule."""
    bench = Bench(door, small(num_blocks=8), seen)
    for first in (10, 20, 30, 40):
        bench.run(span(first, first + 7))
    track = bench.add(span(50, 57), 2)
    has_pool = "pool" in door.hello().capabilities
    before = len(door.pool().free) if has_pool else 8
    plan = bench.schedule()
    planned = any(row.id == track.id for row in plan.rows)
    seen.require(planned or bench.ahead, "PFX-10", track, "is not admitted by the next schedule")
    if has_pool and planned:
        got = before, len(door.pool().free)
        good = got[0] == 8 and 6 - bench.ahead <= got[1] <= 6
        seen.require(good, "PFX-10", f"free before and after are {got}, expected (8, 6)")
    if plan.rows:
        bench.commit(plan)
    bench.drain()
    bench.expect_complete(track, "PFX-12")


@scenario("SCH-7a")
def b31_prompt_that_never_fits_the_pool_is_refused(door: CoreDoor, seen: Evaluations) -> None:
    """16 slots, max_model_len 64: 20 tokens are refused, and three more go on."""
    bench = Bench(door, small(num_blocks=4), seen)
    expect_refused(bench, "SCH-7a", [1] * 20, 1, 20, 16)
    bench.expect_complete(bench.run([1, 2, 3], max_tokens=2), "SCH-7a")


def _expect_room(bench: Bench, p: int, max_tokens: int, room: int) -> None:
    """SCH-7d: refused when added, or ended by its length after `room` outputs and one prefill."""
    try:
        track = bench.add([1] * p, max_tokens)
    except Refused:
        bench.seen.count("SCH-7d")
        return
    for _ in bench.steps("SCH-7d"):
        if len(track.completion) > room:
            break
    got = len(track.completion), track.reason, len(track.admissions)
    wanted = room, "length", 1
    bench.expect(
        got == wanted, "SCH-7d", track, f": outputs, reason, prefills {got}, expected {wanted}"
    )


@scenario("SCH-7d")
def b31_outputs_beyond_the_pool_end_or_are_refused(door: CoreDoor, seen: Evaluations) -> None:
    """16 slots: 14 tokens and 10 outputs are refused, or end after three with one prefill."""
    _expect_room(Bench(door, small(num_blocks=4), seen), 14, 10, 3)


@scenario("SCH-9")
def b37_preempted_output_is_complete_and_counted_once(door: CoreDoor, seen: Evaluations) -> None:
    """p=5 and six outputs, preempted after three."""
    bench = Bench(door, small(num_blocks=3), seen)
    older, younger = bench.add([50, 51], 4), bench.add(span(1, 5), 6)
    bench.drain()
    for track in (older, younger):
        bench.expect_complete(track, "SCH-9")


@scenario("SCH-7d", "SCH-7a")
def b43_total_length_at_max_model_len(door: CoreDoor, seen: Evaluations) -> None:
    """max_model_len=16: ten tokens get six outputs, 15 get one, 16 and 17 are refused."""
    bench = Bench(door, small(max_model_len=16, max_num_batched_tokens=128, num_blocks=64), seen)
    for p, room in ((10, 6), (15, 1)):
        _expect_room(bench, p, 100, room)
    for p in (16, 17):
        expect_refused(bench, "SCH-7a", [1] * p, 1, p, 16)


SCENARIOS = scenarios_of(globals())
