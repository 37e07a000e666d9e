"""Prefix caching: what is found, what must not be, and what is reused first."""

from __future__ import annotations

import random

import pytest
from core_door import Door

from nanovllm.conformance.adapters.reference import HASHES, constant_hash
from nanovllm.engine.block_manager import HashFunction, hash_block
from nanovllm.engine.step import ScheduledStep

A, B, C, D = ([i] * 4 for i in (11, 12, 13, 14))
"""Contents of full blocks."""


def cached(door: Door, prompt: list[int], **options: object) -> int | None:
    """Tokens of `prompt` that one run of it, with one output, found in the cache."""
    return door.run(prompt, **{"max_tokens": 1, **options})[0].num_cached_tokens


def rows(step: ScheduledStep) -> dict[int, tuple[int, int]]:
    return {row.seq.seq_id: (row.start, row.count) for row in step.rows}


# ---- what must not hit -----------------------------------------------------------------------


@pytest.mark.spec("PFX-2")
@pytest.mark.parametrize("hash_function", HASHES.values())
def test_a_different_prefix_is_never_a_hit(hash_function: HashFunction) -> None:
    door = Door(hash_function=hash_function, num_kvcache_blocks=32)
    assert cached(door, [*A, *B, *C, 1]) == 0
    assert cached(door, [*D, *B, *C, 1]) == 0  # only the ancestor differs
    assert cached(door, [*A, *D, *C, 1]) == 4
    assert cached(door, [*B, *C, 1]) == 0
    assert cached(door, [*A, *B, *D, 1]) == 8


@pytest.mark.spec("PFX-2", "PFX-12")
@pytest.mark.parametrize("hash_function", HASHES.values())
def test_no_history_of_eviction_makes_a_wrong_hit(hash_function: HashFunction) -> None:
    door = Door(hash_function=hash_function, num_kvcache_blocks=4, kvcache_block_size=2)
    draw = random.Random(2)
    for _ in range(100):
        door.run([draw.choice((1, 2)) for _ in range(draw.randint(1, 5))], max_tokens=2)


@pytest.mark.spec("PFX-3")
def test_only_full_blocks_are_published() -> None:
    door = Door()
    for prompt, blocks in (([1, 2, 3], 0), ([1, 2, 3, 4], 1), ([1, 2, 3, 4, 5, 6, 7], 1)):
        door.run(prompt, max_tokens=1)
        assert door.blocks.num_published_blocks == blocks


@pytest.mark.spec("PFX-4")
def test_nothing_is_hittable_before_the_commit() -> None:
    door = Door()
    door.add([*A, 1])
    step = door.schedule()
    assert door.blocks.num_published_blocks == 0
    door.commit(step)
    assert door.blocks.num_published_blocks == 1


@pytest.mark.spec("PFX-4", "SCH-15")
def test_a_failed_step_leaves_nothing_hittable() -> None:
    door = Door()
    door.add([*A, *B])
    door.fail_step(door.schedule())
    assert cached(door, [*A, *B, 1]) == 0


@pytest.mark.spec("PFX-4", "SMP-5")
def test_what_an_errored_request_computed_in_that_step_is_not_hittable() -> None:
    door = Door(max_num_batched_tokens=8)
    (seq,) = door.add([*A, *B, *C])
    door.step()
    step = door.schedule()
    door.commit(step, failed=[seq.seq_id])
    assert cached(door, [*A, *B, *C, 1]) == 8


@pytest.mark.spec("PFX-4", "SCH-13")
def test_an_abort_in_flight_publishes_nothing_of_that_step() -> None:
    door = Door()
    (seq,) = door.add([*A, *B])
    step = door.schedule()
    door.abort(seq.seq_id)
    door.commit(step)
    assert cached(door, [*A, *B, 1]) == 0


# ---- what must hit ---------------------------------------------------------------------------


@pytest.mark.spec("PFX-5", "PFX-11")
def test_a_run_of_hits_ends_at_the_first_miss() -> None:
    door = Door(num_kvcache_blocks=4)
    door.run([*A, *B, *C], max_tokens=1)
    assert cached(door, [*A, *D, *C, 1]) == 4
    assert cached(door, [*A, *B, *C, 1]) == 4  # B was reused, so C is out of reach


@pytest.mark.spec("PFX-6", "PFX-11")
@pytest.mark.parametrize(("p", "expected"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_at_least_one_token_is_computed(p: int, expected: int) -> None:
    door = Door()
    prompt = [*A, *B, *C, *D][:p]
    door.run(prompt, max_tokens=1)
    (seq,) = door.add(prompt, max_tokens=1)
    assert rows(door.step()) == {seq.seq_id: (expected, p - expected)}


@pytest.mark.spec("PFX-7")
def test_reusing_a_block_unpublishes_it() -> None:
    door = Door(num_kvcache_blocks=2)
    door.run([*A, *B], max_tokens=1)
    door.add(C, max_tokens=1)
    step = door.schedule()
    assert door.blocks.num_published_blocks == 1
    door.commit(step)
    assert door.blocks.num_published_blocks == 2
    assert cached(door, [*A, *B]) == 4


@pytest.mark.spec("PFX-8")
def test_a_freed_block_stays_hittable_until_it_is_reused() -> None:
    door = Door(num_kvcache_blocks=4)
    door.run([*A, *B], max_tokens=1)
    assert door.blocks.num_free_blocks == 4
    door.run([*C, *D], max_tokens=1)
    assert cached(door, [*A, *B, 1]) == 8


@pytest.mark.spec("PFX-9")
def test_the_least_recently_released_goes_first_a_descendant_before_its_ancestor() -> None:
    door = Door(num_kvcache_blocks=4)
    door.run([*A, *B], max_tokens=1)
    door.run([*C, *D], max_tokens=1)
    door.run([*A, 1], max_tokens=1)  # takes B, the oldest, and makes A the newest
    door.run([7] * 8, max_tokens=1)  # takes the unpublished block first, then D
    kept = set(door.published)
    assert kept == {tuple(A), tuple(C), (7,) * 4, (7,) * 8}


@pytest.mark.spec("PFX-10")
def test_a_hit_on_a_used_block_needs_no_free_block() -> None:
    door = Door(num_kvcache_blocks=4)
    door.add([*A, *B, 1], max_tokens=4)
    door.step()
    (second,) = door.add([*A, *B, 2], max_tokens=4)
    assert rows(door.step()) == {second.seq_id: (8, 1)}
    assert door.blocks.num_free_blocks == 0


@pytest.mark.spec("PFX-10")
@pytest.mark.parametrize(("num_blocks", "fits"), [(5, False), (6, True)])
def test_a_hit_on_a_free_block_consumes_it(num_blocks: int, fits: bool) -> None:
    door = Door(num_kvcache_blocks=num_blocks)
    door.run([*A, *B], max_tokens=1)
    door.add([7] * 9, max_tokens=4)
    door.step()
    (second,) = door.add([*A, *B, 1], max_tokens=1)
    admitted = second.seq_id in rows(door.step())
    assert admitted == fits


@pytest.mark.spec("PFX-12")
def test_outputs_do_not_depend_on_caching() -> None:
    prompts = [[*A, *B, 1], [*A, *B, 2], [*A], [*A, *B], [*A, *B, 1]]
    outputs = []
    for enabled in (True, False):
        door = Door(enable_prefix_caching=enabled)
        warm = [door.run(prompt)[0] for prompt in prompts]
        outputs.append([seq.token_ids for seq in warm])
        outputs.append([Door(enable_prefix_caching=enabled).run(p)[0].token_ids for p in prompts])
        assert any(seq.num_cached_tokens for seq in warm) == enabled
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.spec("PFX-13")
def test_sampling_parameters_do_not_affect_sharing() -> None:
    door = Door()
    door.run([*A, *B, 1], temperature=0.0, seed=1)
    other = {"temperature": 2.0, "seed": 99, "top_k": 5, "repetition_penalty": 1.5, "logprobs": 3}
    assert cached(door, [*A, *B, 1], **other) == 8


@pytest.mark.spec("PFX-14")
@pytest.mark.parametrize("hash_function", [hash_block, constant_hash])
def test_different_salts_never_share(hash_function: HashFunction) -> None:
    door = Door(hash_function=hash_function)
    salts = (None, "red", "blue", "")
    assert [cached(door, [*A, 1], salt=salt) for salt in salts] == [0, 0, 0, 0]
    assert [cached(door, [*A, 2], salt=salt) for salt in salts] == [4, 4, 4, 4]


@pytest.mark.spec("PFX-15")
@pytest.mark.parametrize("lost", [0, 1])
def test_losing_one_twin_does_not_hide_the_other(lost: int) -> None:
    door = Door(num_kvcache_blocks=4)
    twins = [*door.add(A, max_tokens=5), *door.add(A, max_tokens=5)]
    door.step()
    assert door.blocks.num_published_blocks == 2
    door.abort(twins[lost].seq_id)
    door.add([7] * 12, max_tokens=1)  # takes all free blocks
    door.step()
    assert len(door.published) == 1 + 3
    (late,) = door.add([*A, 1], max_tokens=1)
    door.drain()
    assert late.num_cached_tokens == 4
    assert twins[1 - lost].token_ids == Door().run(A, max_tokens=5)[0].token_ids


@pytest.mark.spec("PFX-16")
def test_full_generated_blocks_of_a_finished_request_are_hittable() -> None:
    door = Door()
    (first,) = door.run(A, max_tokens=9)
    assert cached(door, [*first.token_ids, 1]) == 12


@pytest.mark.spec("PFX-16", "PFX-17", "SCH-9")
def test_full_blocks_of_a_preempted_request_are_hittable_and_counted_once() -> None:
    door = Door(num_kvcache_blocks=6, max_num_seqs=2)
    door.add([1] * 8, max_tokens=9)
    (new,) = door.add([2] * 7, max_tokens=9)
    starts = []
    while not new.is_finished:
        step = door.step()
        starts += [row.start for row in step.rows if row.seq is new and row.count > 1]
    assert door.scheduler.stats.num_preemptions == 1
    assert starts[0] == 0
    assert starts[1:] == [8]
    stats = door.scheduler.stats
    assert (stats.num_requests, stats.num_lookup_tokens, stats.num_cached_tokens) == (2, 15, 0)
    assert new.num_cached_tokens == 0


@pytest.mark.spec("PFX-17")
def test_hit_statistics() -> None:
    door = Door()
    cached(door, [*A, *B, 1])
    cached(door, [*A, *B, 1])
    stats = door.scheduler.stats
    assert (stats.num_requests, stats.num_lookup_tokens, stats.num_cached_tokens) == (2, 18, 8)
    assert stats.num_computed_tokens == 9 + 1


@pytest.mark.spec("API-8", "PFX-12")
def test_reset_forgets_content_and_leaves_running_requests_alone() -> None:
    door = Door()
    door.run([*A, 1], max_tokens=1)
    (running,) = door.add([*B, 1], max_tokens=8)
    door.step()
    door.scheduler.reset_prefix_cache()
    assert door.blocks.num_published_blocks == 0
    assert cached(door, [*A, 1]) == 0
    assert running.is_finished


@pytest.mark.spec("PFX-12")
def test_a_disabled_cache_publishes_and_hashes_nothing() -> None:
    def unused(tokens: bytes, parent: bytes) -> bytes:
        raise AssertionError("hashed")

    door = Door(enable_prefix_caching=False, hash_function=unused)
    assert [cached(door, [*A, *B], max_tokens=6) for _ in range(2)] == [0, 0]
    assert door.blocks.num_published_blocks == 0
