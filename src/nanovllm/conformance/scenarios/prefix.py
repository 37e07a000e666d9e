"""The prefix cache at the core door: what must be found, what must not, and what is shared."""

from __future__ import annotations

from nanovllm.conformance.protocol import CoreDoor, RequestOptions
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import Track, small, span
from nanovllm.conformance.verdicts import Evaluations

CACHE = ("prefix_cache",)


def _expect_cached(
    bench: Bench, first: list[int], second: list[int], cached: int, spec_id: str
) -> None:
    """Run one prompt to its end, then another, of which so many tokens must be cached."""
    bench.run(first)
    track = bench.run(second)
    found = track.cached
    bench.expect(found == cached, spec_id, f"{second}: {found} tokens cached, expected {cached}")
    bench.expect_alone(track, "PFX-12")


@scenario("PFX-11", "PFX-12", needs=CACHE)
def hit_covers_the_common_full_blocks(door: CoreDoor, seen: Evaluations) -> None:
    """bs=4: after [1..9], the prompt [1..8, 20, 21] computes its last two tokens only."""
    bench = Bench(door, small(), seen)
    _expect_cached(bench, span(1, 9), [*span(1, 8), 20, 21], 8, "PFX-11")


@scenario("PFX-6", "PFX-12", needs=CACHE)
def hit_of_single_token_blocks_leaves_one_token(door: CoreDoor, seen: Evaluations) -> None:
    """bs=1: the same four tokens again are cached but for the last."""
    _expect_cached(Bench(door, small(block_size=1), seen), span(1, 4), span(1, 4), 3, "PFX-6")


@scenario("PFX-5", "PFX-12", needs=CACHE)
def hit_ends_at_the_first_miss(door: CoreDoor, seen: Evaluations) -> None:
    """A resident block behind one that is not is no hit: its ancestors differ."""
    second = [*span(1, 4), 30, 31, 32, 33, *span(9, 13)]
    _expect_cached(Bench(door, small(), seen), span(1, 13), second, 4, "PFX-5")


@scenario("PFX-3", "PFX-12", needs=CACHE)
def only_full_blocks_are_hits(door: CoreDoor, seen: Evaluations) -> None:
    """bs=4: of six common tokens the first four are cached."""
    _expect_cached(Bench(door, small(), seen), span(1, 6), [*span(1, 6), 20], 4, "PFX-3")


@scenario("PFX-16", "PFX-12", needs=CACHE)
def generated_blocks_of_a_finished_request_are_hits(door: CoreDoor, seen: Evaluations) -> None:
    """bs=4, p=3, k=6: eight tokens are stored, and the conversation goes on behind them."""
    bench = Bench(door, small(), seen)
    first = bench.run([1, 2, 3], max_tokens=6)
    second = bench.run([*first.tokens, 20])
    seen.require(second.cached == 8, "PFX-16", second.cached, "cached tokens, expected 8")
    bench.expect_alone(second, "PFX-12")


@scenario("PFX-4", "PFX-12", needs=CACHE)
def last_sampled_token_completes_no_hit(door: CoreDoor, seen: Evaluations) -> None:
    """bs=4, p=3, k=5: eight tokens are known, the last is not stored, one block is found."""
    bench = Bench(door, small(), seen)
    first = bench.run([1, 2, 3], max_tokens=5)
    second = bench.run([*first.tokens, 20])
    good = second.cached == 4 or (second.cached == 8 and bench.ahead)  # a discarded row stored it
    seen.require(good, "PFX-4", second.cached, "cached tokens, expected 4")
    bench.expect_alone(second, "PFX-12")


@scenario("PFX-16", "SCH-9", needs=CACHE)
def full_blocks_of_a_preempted_request_are_hits(door: CoreDoor, seen: Evaluations) -> None:
    """Preempted with a full generated block, it finds what nobody has reused since."""
    bench = Bench(door, small(num_blocks=6), seen)
    tracks = [bench.add([40] * 4, 13), bench.add([1, 2, 3], 12)]
    bench.drain()
    for track in tracks:
        bench.expect_complete(track, "SCH-9")
        for which in range(1, len(track.admissions)):
            bench.expect_hits(track, "PFX-16", which)


@scenario("PFX-8", needs=CACHE)
def freed_block_stays_hittable_until_it_is_reused(door: CoreDoor, seen: Evaluations) -> None:
    """Others come and go in blocks that were free all along."""
    bench = Bench(door, small(num_blocks=32), seen)
    bench.run(span(1, 9))
    for i in range(3):
        bench.run([20 + i] * 5, max_tokens=2)
    again = bench.run(span(1, 9))
    if again.admissions[0].resident == 2:  # an engine may have reused one of them all the same
        seen.require(again.cached == 8, "PFX-8", again.cached, "cached tokens, expected 8")
    bench.expect_hits(again, "PFX-8")


@scenario("PFX-10", needs=CACHE)
def hits_on_free_blocks_are_admitted_and_consume_them(door: CoreDoor, seen: Evaluations) -> None:
    """N=4: a prompt of 16 tokens whose first eight are cached takes the whole pool."""
    bench = Bench(door, small(num_blocks=4), seen)
    bench.run(span(1, 8))
    track = bench.add([*span(1, 8), *span(20, 27)], 1)
    _expect_admitted_next(bench, track)
    bench.drain()
    bench.expect_hits(track, "PFX-11")
    bench.expect_complete(track, "PFX-12")


@scenario("PFX-10", needs=CACHE, level="should")
def hits_on_used_blocks_need_no_free_block(door: CoreDoor, seen: Evaluations) -> None:
    """N=4, one block free: a prompt of three blocks fits, since two are shared."""
    bench = Bench(door, small(num_blocks=4), seen)
    bench.add(span(1, 9), 3)
    bench.step()
    _expect_admitted_next(bench, bench.add([*span(1, 8), 20], 1))
    bench.drain()


def _expect_admitted_next(bench: Bench, track: Track) -> None:
    for _ in range(1 + bench.ahead):
        bench.step()
    bench.expect(track.rows, "PFX-10", track, "fits, and is not admitted by the next schedule")


@scenario("PFX-10", needs=CACHE)
def free_hits_are_not_counted_as_free_blocks(door: CoreDoor, seen: Evaluations) -> None:
    """N=4, two blocks free and both hits: a prompt of three blocks does not fit yet."""
    bench = Bench(door, small(num_blocks=4), seen)
    bench.run(span(1, 8))
    first = bench.add([30] * 5, 4)
    bench.step()
    second = bench.add([*span(1, 8), 20], 1)
    bench.drain()
    for track in (first, second):
        bench.expect_complete(track, "PFX-10")


@scenario("PFX-15", needs=CACHE)
def twins_in_one_step_are_equal_and_neither_hides_the_other(
    door: CoreDoor, seen: Evaluations
) -> None:
    """Whether they share or duplicate; and after one duplicate is lost, the other is found."""
    bench = Bench(door, small(num_blocks=8), seen)
    twins = [bench.add(span(1, 9), 2), bench.add(span(1, 9), 2)]
    bench.drain()
    for twin in twins:
        bench.expect_complete(twin, "PFX-15")
    for size in (20, 8):
        bench.run([50 + size] * size)
        again = bench.run(span(1, 9))
        bench.expect_hits(again, "PFX-15")
        bench.expect_alone(again, "PFX-15")


@scenario("PFX-4", needs=("prefix_cache", "chunked_prefill"))
def twin_of_a_partly_computed_prompt_reads_what_is_computed(
    door: CoreDoor, seen: Evaluations
) -> None:
    """A prompt of 16 in chunks of 4; its twin arrives after the first."""
    world = small(max_num_batched_tokens=4, max_num_seqs=2, num_blocks=16)
    bench = Bench(door, world, seen)
    first = bench.add(span(1, 16), 2)
    bench.step()
    twin = bench.add(span(1, 16), 2)
    bench.drain()
    for track in (first, twin):
        bench.expect_alone(track, "PFX-4")


@scenario("PFX-4", needs=("prefix_cache", "fail_step"))
def blocks_of_a_failed_step_are_no_hits(door: CoreDoor, seen: Evaluations) -> None:
    """The step that was to write them raised; the same prompt again computes all of it."""
    bench = Bench(door, small(), seen)
    failed = bench.add(span(1, 9), 1)
    bench.fail_step(bench.schedule())
    bench.drain()
    again = bench.add(span(1, 9), 1)
    bench.drain()
    if failed.reason == "error":
        seen.require(again.cached == 0, "PFX-4", again.cached, "cached tokens, expected 0")
    bench.expect_complete(again, "PFX-4")


@scenario("PFX-13", needs=("prefix_cache", "stop"))
def sampling_parameters_do_not_affect_sharing(door: CoreDoor, seen: Evaluations) -> None:
    """KV depends on tokens and positions alone, whatever ends the request."""
    bench = Bench(door, small(), seen)
    bench.add(span(1, 9), 1, options=RequestOptions(stop_token_ids=(77,)))
    bench.drain()
    other = bench.run(span(1, 9), max_tokens=3)
    seen.require(other.cached == 8, "PFX-13", other.cached, "cached tokens, expected 8")


@scenario("PFX-14", needs=("prefix_cache", "salt"))
def different_salts_never_share(door: CoreDoor, seen: Evaluations) -> None:
    """The same prompt under no salt, a, b, and a again: only the last is a hit."""
    bench = Bench(door, small(), seen)
    for salt, cached in ((None, 0), ("a", 0), ("b", 0), ("a", 8), (None, 8)):
        track = bench.add(span(1, 9), 1, options=RequestOptions(salt=salt))
        bench.drain()
        found, spec_id = track.cached, "PFX-11" if cached else "PFX-14"
        seen.require(found == cached, spec_id, f"salt {salt}: {found} cached, expected {cached}")
        bench.expect_alone(track, "PFX-14")


@scenario("PFX-17", needs=("prefix_cache", "stats"))
def statistics_count_a_request_once(door: CoreDoor, seen: Evaluations) -> None:
    """Prompt tokens looked up and found, of four requests of which some may be preempted."""
    bench = Bench(door, small(num_blocks=5), seen)
    tracks = [bench.run(span(1, 9)), bench.run(span(1, 9))]
    tracks += [bench.add([40] * 8, 6), bench.add([41] * 5, 6)]
    bench.drain()
    stats = door.stats()
    looked_up = sum(len(track.prompt) for track in tracks)
    cached = sum(track.cached for track in tracks)
    seen.require(
        (stats.num_lookup_tokens, stats.num_cached_tokens) == (looked_up, cached),
        *("PFX-17", stats, "after", looked_up, "prompt tokens of which", cached, "were cached"),
    )


@scenario("PFX-12")
def caching_switched_off_finds_nothing(door: CoreDoor, seen: Evaluations) -> None:
    """Without a prefix cache every prompt is computed, with the same outputs."""
    bench = Bench(door, small(prefix_cache=False), seen)
    for track in (bench.run(span(1, 9), max_tokens=3), bench.run(span(1, 9), max_tokens=3)):
        bench.expect_complete(track, "PFX-12")
        seen.require(track.cached == 0, "PFX-12", track.cached, "cached tokens without a cache")


@scenario("PFX-1", needs=("hash",))
def hash_covers_tokens_and_parent(door: CoreDoor, seen: Evaluations) -> None:
    """Different tokens or parents, different hashes; digits do not run into each other."""
    Bench(door, small(), seen)
    root = door.hash([1, 2, 3, 4], None)
    hashes = {
        "[1,2,3,4]": root,
        "[1,2,3,4] behind itself": door.hash([1, 2, 3, 4], root),
        "[1,2,4,3]": door.hash([1, 2, 4, 3], None),
        "[12,3,4,5]": door.hash([12, 3, 4, 5], None),
        "[1,23,4,5]": door.hash([1, 23, 4, 5], None),
        "[1,2,34,5]": door.hash([1, 2, 34, 5], None),
        "[1,2,3,260]": door.hash([1, 2, 3, 260], None),
        "[1,2,3,65540]": door.hash([1, 2, 3, 65540], None),
    }
    by_hash: dict[str, str] = {}
    for name, value in hashes.items():
        other = by_hash.setdefault(value, name)
        seen.require(other == name, "PFX-1", name, "and", other, "have the hash", value)
    again = door.hash([1, 2, 3, 4], None)
    seen.require(again == root, "PFX-1", "the same block hashes to", root, "and to", again)


@scenario("PFX-1", needs=("hash",), level="should")
def hash_is_equal_across_runs(door: CoreDoor, seen: Evaluations) -> None:
    """What one engine published, the next would find."""
    Bench(door, small(), seen)
    before = door.hash([1, 2, 3, 4], None)
    Bench(door, small(num_blocks=9), seen)
    after = door.hash([1, 2, 3, 4], None)
    seen.require(before == after, "PFX-1", before, "became", after, "after a reset")


SCENARIOS = scenarios_of(globals())
