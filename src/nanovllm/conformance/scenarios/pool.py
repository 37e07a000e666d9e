"""Blocks at the core door: how many are held, who shares them, and what of a row is sent."""

from __future__ import annotations

from nanovllm.conformance.protocol import CoreDoor, Plan, World
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import Track, ceil_div, small, span
from nanovllm.conformance.verdicts import Evaluations

CACHE = ("prefix_cache",)


@scenario("BLK-6")
def last_sampled_token_is_never_stored(door: CoreDoor, seen: Evaluations) -> None:
    """ceil((p + k - 1) / bs) blocks are enough for k outputs from p tokens, for p, k <= 5."""
    for p in range(1, 6):
        for k in range(1, 6):
            enough = ceil_div(p + k - 1, 2)
            bench = Bench(door, small(block_size=2, num_blocks=enough), seen)
            bench.expect_complete(bench.run([1] * p, max_tokens=k), "BLK-6")
            held = max(len(row.block_table) for plan in bench.plans for row in plan.rows)
            seen.require(held <= enough, "BLK-6", f"p={p}, k={k}: {held} blocks, not {enough}")


@scenario("BLK-1", needs=("pool",))
def pool_is_conserved_from_call_to_call(door: CoreDoor, seen: Evaluations) -> None:
    """Each block is free or used, and listed once, while requests come, share and go."""
    bench = Bench(door, small(num_blocks=6), seen)
    for prompt, max_tokens in ((span(1, 9), 5), (span(1, 8), 6), ([7], 2)):
        bench.add(prompt, max_tokens)
        for _ in range(2):
            bench.step()
            _expect_conserved(bench)
    for _ in bench.steps():
        _expect_conserved(bench)


def _expect_conserved(bench: Bench) -> None:
    pool = bench.door.pool()
    used = [b for b, count in pool.ref_counts.items() if count and b not in pool.reserved]
    listed = [*pool.free, *used, *pool.reserved]
    n = bench.world.num_blocks
    once = len(set(listed)) == len(listed) == n
    bench.expect(once, "BLK-1", f"free {pool.free}, used {used}, reserved {pool.reserved}, N={n}")


@scenario("SEQ-6", needs=("wire",))
def wire_of_a_decode_row_does_not_grow_with_its_length(door: CoreDoor, seen: Evaluations) -> None:
    """A hundred tokens more cost the entries of the longer table, at most 16 bytes each."""
    short, short_table = _decode_row_on_the_wire(door, seen, 8)
    long, long_table = _decode_row_on_the_wire(door, seen, 108)
    allowed = short + 16 * (long_table - short_table)
    seen.require(long <= allowed, "SEQ-6", f"decode rows take {short} and {long} bytes")


def _decode_row_on_the_wire(door: CoreDoor, seen: Evaluations, p: int) -> tuple[int, int]:
    """Bytes, and blocks in the table, of the row that follows the first output."""
    bench = Bench(door, World(16, 16, max_num_batched_tokens=256, max_model_len=256), seen)
    track = bench.add([1] * p, 4)
    bench.until(lambda: track.completion)
    for _ in range(1 + bench.ahead):
        if bench.schedule().rows:
            break
    return door.wire(track.id), len(track.table)


@scenario("SEQ-6", needs=("wire",))
def wire_of_a_resumed_request_has_every_token(door: CoreDoor, seen: Evaluations) -> None:
    """What is computed again crosses again: not less than for a prompt of so many tokens."""
    bench = Bench(door, small(num_blocks=5), seen)
    bench.add([40] * 8, 8)
    track = bench.add(span(1, 7), 8)
    resumed: list[tuple[int, int]] = []

    def look(plan: Plan) -> None:
        own = [row for row in plan.rows if row.id == track.id and track.num_preempted]
        resumed.extend((row.count, door.wire(row.id)) for row in own if row.count > 1)

    bench.drain(look=look)
    for count, size in resumed:
        bench = Bench(door, small(), seen)
        prompt = bench.add(span(1, count), 1)
        if bench.schedule().rows:
            least = door.wire(prompt.id)
            label = f"{count} tokens, resumed, cross in {size} bytes, as a prompt in {least}"
            seen.require(size >= least, "SEQ-6", label)


# ---- shared -----------------------------------------------------------------------------------


@scenario("PFX-11", "BLK-8", needs=CACHE)
def hits_on_a_running_request_share_its_blocks(door: CoreDoor, seen: Evaluations) -> None:
    """Two requests with a common prefix read it from the same blocks."""
    bench = Bench(door, small(), seen)
    first = bench.add(span(1, 9), 12)
    bench.step()
    second = bench.add([*span(1, 8), 20], 12)
    _share(bench, first, second)
    bench.drain()
    for track in (first, second):
        bench.expect_complete(track, "BLK-8")


@scenario("BLK-2", needs=("prefix_cache", "pool"))
def shared_block_counts_its_holders(door: CoreDoor, seen: Evaluations) -> None:
    """ref_count is the number of live tables that name a block, also where two share it."""
    bench = Bench(door, small(), seen)
    first = bench.add(span(1, 9), 12)
    bench.step()
    second = bench.add([*span(1, 8), 20], 12)
    _share(bench, first, second)
    held = [block for track in bench.live for block in track.table]
    if bench.ahead == 0:
        counts = {block: held.count(block) for block in held}
        found = _ref_counts(door)
        seen.require(found == counts, "BLK-2", "ref counts", found, "of tables", counts)
    bench.drain()
    left = _ref_counts(door)
    seen.require(not left, "BLK-2", "ref counts", left, "when all have ended")


def _ref_counts(door: CoreDoor) -> dict[int, int]:
    pool = door.pool()
    return {b: count for b, count in pool.ref_counts.items() if count and b not in pool.reserved}


def _share(bench: Bench, first: Track, second: Track) -> None:
    """Step until both run; then what the second found is the first one's."""
    bench.until(lambda: second.rows or first.reason)
    if not second.rows:
        return
    num_shared = second.cached // bench.world.block_size
    bench.expect(second.cached == 8, "PFX-11", second.cached, "cached tokens, expected 8")
    mine, theirs = second.rows[0].block_table[:num_shared], first.rows[0].block_table[:num_shared]
    bench.expect(mine == theirs, "PFX-11", "a hit reads", mine, "where", theirs, "holds it")


@scenario("BLK-8", needs=CACHE)
def shared_blocks_outlive_their_first_holder(door: CoreDoor, seen: Evaluations) -> None:
    """The first of two holders ends; what comes then takes every free block, and not those."""
    bench = Bench(door, small(num_blocks=9), seen)
    first = bench.add(span(1, 9), 2)
    bench.step()
    second = bench.add([*span(1, 8), 20], 10)
    bench.until(lambda: first.reason)
    for token in (50, 51, 52):
        bench.add([token] * 16, 1)
        bench.step()
    bench.drain()
    bench.expect_complete(second, "BLK-8")


SCENARIOS = scenarios_of(globals())
