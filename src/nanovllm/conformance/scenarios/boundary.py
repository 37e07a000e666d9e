"""The boundary table: lengths around one and two blocks, each met in four situations.

Most mistakes of paged caches are off by one where a block fills up: bs - 1, bs, bs + 1 tokens, and
the same around 2 bs; cold, warm, beside a twin, and preempted with just so many tokens known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nanovllm.conformance.protocol import CoreDoor
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import Run, Scenario
from nanovllm.conformance.scenarios.track import Track, ceil_div, small, span
from nanovllm.conformance.verdicts import Evaluations

BLOCK_SIZE = 4
LENGTHS = tuple(
    (f"{blocks}bs{offset:+d}" if offset else f"{blocks}bs", blocks * BLOCK_SIZE + offset)
    for blocks in (1, 2)
    for offset in (-1, 0, 1)
)
Situation = Callable[[Bench, int], None]


def _expect_tables(bench: Bench, track: Track) -> None:
    """Each row of an undisturbed request holds the blocks that it needs, or one ahead (BLK-4)."""
    most = ceil_div(len(track.prompt) + track.max_tokens - 1, BLOCK_SIZE)
    for row in track.rows:
        held, least = len(row.block_table), ceil_div(row.end, BLOCK_SIZE)
        bench.expect(
            least <= held <= most + bench.ahead,
            *("BLK-4", f"{held} blocks for positions up to {row.end}, expected {least} to {most}"),
        )


def cold(bench: Bench, length: int) -> None:
    """Nothing is cached."""
    track = bench.run(span(1, length), max_tokens=6)
    bench.expect(track.cached == 0, "PFX-11", track.cached, "cached tokens in an empty cache")
    bench.expect_complete(track, "KV-1")
    _expect_tables(bench, track)


def warm(bench: Bench, length: int) -> None:
    """The same prompt was there before, and so was each longer one that begins with it."""
    first = bench.run(span(1, length), max_tokens=6)
    for more in range(BLOCK_SIZE + 1):
        track = bench.run([*first.tokens[: length + more]], max_tokens=6 - more)
        bench.expect_hits(track, "PFX-11")
        bench.expect(track.completion == first.completion[more:], "PFX-12", track, "after", first)


def twin(bench: Bench, length: int) -> None:
    """Its twin is in the same batch, and so is a prompt that shares all but the last token."""
    prompt = span(1, length)
    tracks = [bench.add(p, 6) for p in (prompt, prompt, [*prompt[:-1], 50])]
    bench.drain()
    for track in tracks:
        bench.expect_complete(track, "PFX-15")


def preempted(bench: Bench, length: int) -> None:
    """An older request takes its last block as the younger knows `length` tokens."""
    bench.add([60] * BLOCK_SIZE, 5)
    track = bench.add(span(1, length - 1), 4)
    bench.drain()
    for which in range(1, len(track.admissions)):
        bench.expect_hits(track, "PFX-16", which)
    bench.expect_complete(track, "SCH-9")


def alone(bench: Bench, length: int) -> None:
    """Alone, without a prefix cache."""
    track = bench.run(span(1, length), max_tokens=4)
    _expect_tables(bench, track)
    bench.expect_complete(track, "KV-1")


def crowded(bench: Bench, length: int) -> None:
    """Beside a twin, and preempted, without a prefix cache."""
    tracks = [bench.add([60] * BLOCK_SIZE, 5), *(bench.add(span(1, length - 1), 4) for _ in "12")]
    bench.drain()
    for track in tracks:
        bench.expect_complete(track, "SCH-9")


def _run(situation: Situation, length: int, num_blocks: int, prefix_cache: bool) -> Run:
    world = small(num_blocks=num_blocks, prefix_cache=prefix_cache)

    def run(door: CoreDoor, seen: Evaluations) -> None:
        situation(Bench(door, world, seen), length)

    run.__doc__ = f"{length} tokens with blocks of {BLOCK_SIZE}. {situation.__doc__}"
    return run


def _table() -> Iterator[Scenario]:
    for name, length in LENGTHS:
        tight = 1 + ceil_div(length - 1, BLOCK_SIZE)
        rows: list[tuple[Situation, tuple[str, ...], int]] = [
            (cold, ("KV-1", "BLK-4", "PFX-11"), 16),
            (warm, ("PFX-11", "PFX-12"), 32),
            (twin, ("PFX-15",), 16),
            (preempted, ("SCH-9", "PFX-16"), tight),
        ]
        for situation, spec_ids, num_blocks in rows:
            run = _run(situation, length, num_blocks, prefix_cache=True)
            label = f"boundary-{name}-{situation.__name__}"
            yield Scenario(label, spec_ids, "core", run, frozenset({"prefix_cache"}))
        for situation, spec_ids in ((alone, ("KV-1", "BLK-4")), (crowded, ("SCH-9",))):
            run = _run(situation, length, tight, prefix_cache=False)
            label = f"boundary-{name}-uncached-{situation.__name__}"
            yield Scenario(label, spec_ids, "core", run)


SCENARIOS = tuple(_table())
