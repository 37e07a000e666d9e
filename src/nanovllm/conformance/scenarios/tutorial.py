"""The tutorial's own defects at the core door, where no public case has them."""

from __future__ import annotations

from nanovllm.conformance.protocol import CoreDoor
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import small
from nanovllm.conformance.verdicts import Evaluations

CACHE = ("prefix_cache",)


@scenario("PFX-2", "PFX-11", needs=CACHE)
def tutorial_2_stale_entry_never_reads_another_prefix(door: CoreDoor, seen: Evaluations) -> None:
    """bs=2, N=3: the second block of [1,1,5,5] is gone when [1,1,5,5,8] asks for it."""
    bench = Bench(door, small(block_size=2, num_blocks=3), seen)
    tracks = [bench.run(prompt) for prompt in ([1, 1, 5, 5, 9], [2, 2, 5, 5], [1, 1, 5, 5, 8])]
    seen.require(tracks[2].cached <= 2, "PFX-2", f"{tracks[2].cached} cached tokens, expected 2")
    bench.expect_hits(tracks[2], "PFX-11")
    for track in tracks:
        bench.expect_complete(track, "PFX-2")


@scenario("PFX-9", needs=CACHE)
def tutorial_2_first_block_is_still_found(door: CoreDoor, seen: Evaluations) -> None:
    """bs=2, N=3, the same three prompts: a right engine caches two tokens in the third."""
    bench = Bench(door, small(block_size=2, num_blocks=3), seen)
    for prompt in ([1, 1, 5, 5, 9], [2, 2, 5, 5]):
        bench.run(prompt)
    cached = bench.run([1, 1, 5, 5, 8]).cached
    seen.require(cached == 2, "PFX-9", f"{cached} cached tokens, expected 2")


SCENARIOS = scenarios_of(globals())
