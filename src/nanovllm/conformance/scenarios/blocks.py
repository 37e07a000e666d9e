"""The blocks door: for those who have a block manager and no scheduler yet."""

from __future__ import annotations

import random
from functools import partial

from nanovllm.conformance.protocol import BlocksDoor, World
from nanovllm.conformance.scenarios.blocks_driver import Shelf
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import small, span
from nanovllm.conformance.verdicts import Evaluations

blocks = partial(scenario, door="blocks")
CACHE = ("prefix_cache",)
INVARIANTS = ("BLK-1", "BLK-2", "BLK-3", "BLK-5", "BLK-8")
PROMPTS = ((1, 1, 2), (2, 1, 2, 2), (1, 1, 2, 2, 1))
"""Their blocks of two tokens collide in part, at equal and at different places."""

Operation = tuple[str, int]


def _options(shelf: Shelf) -> list[Operation]:
    """All that may be done now; requests are named by their place among those that live."""
    live = range(len(shelf.tables))
    allocate = [("allocate", i) for i in range(len(PROMPTS))]
    return [*allocate, *(("append", i) for i in live), *(("release", i) for i in live)]


def _perform(shelf: Shelf, operation: Operation) -> None:
    name, which = operation
    if name == "allocate":
        shelf.allocate(PROMPTS[which])
        return
    request = list(shelf.tables)[which]
    if name == "append":
        shelf.append(request, 1 + len(shelf.tokens[request]) % 2)
    else:
        shelf.release(request)


def _expect_lookups(shelf: Shelf) -> None:
    if shelf.caches:
        for prompt in PROMPTS:
            shelf.expect_lookup(prompt, "PFX-8")


def _every_story(door: BlocksDoor, world: World, seen: Evaluations, longest: int) -> None:
    """Each sequence of operations on an empty pool; the shortest faulty one is met first."""
    stories: list[tuple[Operation, ...]] = [()]
    for length in range(longest + 1):
        longer = []
        for story in stories:
            shelf = Shelf(door, world, seen)
            for operation in story:
                _perform(shelf, operation)
            if length == longest:
                _expect_lookups(shelf)
            longer += [(*story, operation) for operation in _options(shelf)]
        stories = longer


@blocks("BLK-1", *INVARIANTS[1:])
def every_short_story_of_a_tiny_pool(door: BlocksDoor, seen: Evaluations) -> None:
    """All sequences of up to four calls on three blocks of two tokens."""
    _every_story(door, World(block_size=2, num_blocks=3), seen, longest=4)


@blocks("BLK-1", *INVARIANTS[1:], "PFX-8", "PFX-16")
def long_random_stories(door: BlocksDoor, seen: Evaluations) -> None:
    """Thirty walks of forty calls, over blocks of 1 to 3 tokens and pools of 2 to 7."""
    for seed in range(30):
        draw = random.Random(seed)
        world = World(block_size=1 + seed % 3, num_blocks=draw.randint(2, 7))
        shelf = Shelf(door, world, seen)
        for _ in range(40):
            _perform(shelf, draw.choice(_options(shelf)))
            _expect_lookups(shelf)


# ---- exact examples --------------------------------------------------------------------------


def _pass_by(shelf: Shelf, tokens: list[int]) -> None:
    """A request comes and goes."""
    request = shelf.allocate(tokens)
    if request is not None:
        shelf.release(request)


@blocks("BLK-3", "BLK-1")
def refused_allocation_changes_nothing(door: BlocksDoor, seen: Evaluations) -> None:
    """N=3: a request holds two blocks; three do not fit, one does."""
    shelf = Shelf(door, small(num_blocks=3), seen)
    shelf.allocate(span(1, 5))
    refused, fits = shelf.allocate([9] * 9), shelf.allocate([8] * 4)
    seen.require(refused is None, "BLK-3", "three blocks are given of one that is free")
    seen.require(fits is not None, "BLK-3", "one block is refused where one is free")


@blocks("BLK-5")
def append_takes_a_block_where_the_last_is_full(door: BlocksDoor, seen: Evaluations) -> None:
    """Twelve tokens one after the other, blocks of 1, 2, 3 and 4."""
    for block_size in (1, 2, 3, 4):
        shelf = Shelf(door, small(block_size=block_size), seen)
        request = shelf.allocate([5])
        for token in range(11):
            if request is not None:
                shelf.append(request, token)


@blocks("PFX-11", "PFX-3", needs=CACHE)
def lookup_finds_leading_full_blocks_and_changes_nothing(
    door: BlocksDoor, seen: Evaluations
) -> None:
    """bs=4, after [1..10]: what equals it for so many tokens, rounded down to blocks."""
    shelf = Shelf(door, small(), seen)
    _pass_by(shelf, span(1, 10))
    before = door.pool()
    for tokens, expected in (
        (span(1, 3), 0),
        (span(1, 4), 4),
        (span(1, 9), 8),
        (span(1, 30), 8),
        ([1, 2, 3, 4, 5, 6, 7, 9], 4),
        ([9, 2, 3, 4, *span(5, 8)], 0),
        (span(5, 8), 0),
    ):
        found = door.lookup([*tokens, 0])
        seen.require(found == expected, "PFX-11", f"{tokens}: {found} found, expected {expected}")
    seen.require(door.pool() == before, "PFX-11", "lookups changed", before, "to", door.pool())


@blocks("PFX-16", needs=CACHE)
def generated_blocks_are_found(door: BlocksDoor, seen: Evaluations) -> None:
    """bs=4: three tokens and five appended make two full blocks."""
    shelf = Shelf(door, small(), seen)
    request = shelf.allocate([1, 2, 3])
    if request is not None:
        for token in span(4, 8):
            shelf.append(request, token)
        shelf.expect_lookup(span(1, 9), "PFX-16")
        shelf.release(request)
    shelf.expect_lookup(span(1, 9), "PFX-16")


@blocks("PFX-10", needs=CACHE)
def cached_blocks_are_free(door: BlocksDoor, seen: Evaluations) -> None:
    """N=8, all cached: the fifth prompt of two blocks is served."""
    shelf = Shelf(door, small(num_blocks=8), seen)
    for first in (10, 20, 30, 40):
        _pass_by(shelf, span(first, first + 7))
    fifth = shelf.allocate(span(50, 57))
    seen.require(fifth is not None, "PFX-10", "two blocks are refused while none is used")


@blocks("PFX-10", needs=CACHE, level="should")
def hit_on_a_used_block_needs_no_free_one(door: BlocksDoor, seen: Evaluations) -> None:
    """N=4, one block free: a prompt of three blocks, two of them shared."""
    shelf = Shelf(door, small(num_blocks=4), seen)
    shelf.allocate(span(1, 9))
    granted = shelf.allocate([*span(1, 8), 20]) is not None
    seen.require(granted, "PFX-10", "three blocks of which two are shared do not fit into one")


@blocks("PFX-6", needs=CACHE)
def whole_prompt_in_the_cache_leaves_a_token(door: BlocksDoor, seen: Evaluations) -> None:
    """bs=4: [1..8] again has 4 to 7 cached tokens, beside the first and after it."""
    shelf = Shelf(door, small(), seen)
    first = shelf.allocate(span(1, 8))
    shelf.allocate(span(1, 8))
    if first is not None:
        shelf.release(first)
    shelf.allocate(span(1, 8))


@blocks("PFX-2", "PFX-7", needs=CACHE)
def reused_block_is_forgotten(door: BlocksDoor, seen: Evaluations) -> None:
    """N=2: X, then Y in the same two blocks, then X again (B14)."""
    shelf = Shelf(door, small(num_blocks=2), seen)
    for tokens in (span(1, 8), span(11, 18)):
        _pass_by(shelf, tokens)
    found = door.lookup(span(1, 9))
    seen.require(found == 0, "PFX-2", f"{found} tokens of X are found in blocks that hold Y")
    _pass_by(shelf, span(1, 8))


@blocks("PFX-2", needs=("prefix_cache", "hash_override"))
def colliding_hashes_share_nothing_wrong(door: BlocksDoor, seen: Evaluations) -> None:
    """Every block has one hash: what shares a block has its tokens and all before them."""
    shelf = Shelf(door, small(block_size=2, num_blocks=12, hash="constant"), seen)
    shelf.judges_completeness = False
    draw = random.Random(17)
    for _ in range(30):
        request = shelf.allocate([draw.choice((1, 2)) for _ in range(draw.randint(1, 7))])
        if request is None or draw.random() < 0.4:
            for number in list(shelf.tables):
                shelf.release(number)


@blocks("PFX-15", needs=CACHE)
def losing_one_duplicate_does_not_hide_the_other(door: BlocksDoor, seen: Evaluations) -> None:
    """Twins of a whole block each compute it; then one block after the other is reused."""
    shelf = Shelf(door, small(num_blocks=3), seen)
    twins = shelf.allocate(span(1, 4)), shelf.allocate(span(1, 4))
    for twin in twins:
        if twin is not None:
            shelf.release(twin)
    for token in (50, 51, 52):
        shelf.allocate([token])
        shelf.expect_lookup(span(1, 5), "PFX-15", twins=True)


@blocks("PFX-9", needs=CACHE)
def deepest_block_of_the_oldest_is_reused_first(door: BlocksDoor, seen: Evaluations) -> None:
    """N=4: two prompts of two blocks; a third takes one (B21), a fourth another."""
    shelf = Shelf(door, small(num_blocks=4), seen)
    for first in (1, 11):
        _pass_by(shelf, span(first, first + 7))
    for token, older in ((21, 4), (22, 0)):
        shelf.allocate([token])
        found = door.lookup(span(1, 9)), door.lookup(span(11, 19))
        seen.require(found == (older, 8), "PFX-9", f"found {found}, expected {(older, 8)}")


SCENARIOS = scenarios_of(globals())
