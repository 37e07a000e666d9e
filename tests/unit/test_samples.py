"""Several samples of one prompt (`n`)."""

from __future__ import annotations

import pytest
from core_door import Door
from test_scheduler import POLICIES, rows

from nanovllm.sampling_params import SamplingParams

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2, 3]


@pytest.mark.spec("FRK-1")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caching", [True, False])
def test_samples_equal_requests_with_derived_seeds(policy: str, caching: bool) -> None:
    options = {"policy": policy, "enable_prefix_caching": caching, "alphabet": range(50)}
    samples = Door(**options).run(PROMPT, n=3, seed=7)
    seeds = [SamplingParams(seed=7, n=3).derive(i).seed for i in range(3)]
    alone = [Door(**options).run(PROMPT, seed=seed)[0] for seed in seeds]
    assert [seq.token_ids for seq in samples] == [seq.token_ids for seq in alone]
    assert len({tuple(seq.token_ids) for seq in samples}) == 3
    assert seeds[0] == 7


@pytest.mark.spec("FRK-1")
def test_samples_without_a_seed_are_given_different_ones() -> None:
    door = Door()
    params = SamplingParams(max_tokens=2, n=4)
    seeds = {seq.params.seed for seq in door.scheduler.add([1, 2], params)}
    assert len(seeds) == 4
    assert None not in seeds


@pytest.mark.spec("FRK-2", "BLK-2")
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("p", "shared"), [(9, 2), (8, 1), (4, 0), (1, 0)])
def test_full_blocks_of_the_prompt_are_shared_and_computed_once(
    p: int, shared: int, caching: bool
) -> None:
    door = Door(num_kvcache_blocks=16, enable_prefix_caching=caching)
    samples = door.add(PROMPT[:p], n=3, max_tokens=3)
    assert rows(door.step()) == {0: (0, p)}
    assert rows(door.step()) == {1: (4 * shared, p - 4 * shared), 2: (4 * shared, p - 4 * shared)}
    tables = [seq.block_table for seq in samples]
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    assert len({block for table in tables for block in table[shared:]}) == 3
    assert [door.blocks.blocks[b].ref_count for b in tables[0][:shared]] == [3] * shared


@pytest.mark.spec("FRK-3", "SCH-3")
@pytest.mark.parametrize("policy", POLICIES)
def test_more_samples_than_seats_end_in_order(policy: str) -> None:
    door = Door(max_num_seqs=2, policy=policy)
    samples = door.run(PROMPT, n=5)
    assert [seq.seq_id for seq in samples] == [0, 1, 2, 3, 4]
    assert {seq.finish_reason for seq in samples} == {"length"}


@pytest.mark.spec("FRK-3", "SCH-13")
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_drops_all_samples_whatever_their_state(num_steps: int) -> None:
    door = Door(max_num_seqs=2)
    samples = door.add(PROMPT, n=3)
    for _ in range(num_steps):
        door.step()
    for seq in samples:
        door.abort(seq.seq_id)
    assert {seq.finish_reason for seq in samples} == {"abort"}
    assert door.scheduler.is_finished()
    assert door.blocks.num_free_blocks == 8


@pytest.mark.spec("FRK-3", "SCH-13")
def test_one_sample_aborted_while_it_waits_for_the_prompt() -> None:
    door = Door()
    first, second, third = door.add(PROMPT, n=3)
    step = door.schedule()
    assert door.abort(second.seq_id)
    assert door.abort(third.seq_id)
    door.commit(step)
    door.drain()
    assert [seq.finish_reason for seq in (first, second, third)] == ["length", "abort", "abort"]


@pytest.mark.spec("FRK-3", "SCH-15")
def test_samples_whose_prompt_failed_end_with_it() -> None:
    door = Door()
    samples = door.add(PROMPT, n=3)
    (other,) = door.add([2, 2])
    step = door.schedule()
    assert door.commit(step, failed=[samples[0].seq_id]) == list(samples)
    assert {(seq.finish_reason, seq.error) for seq in samples} == {("error", "NaN")}
    door.drain()
    assert other.finish_reason == "length"


@pytest.mark.spec("FRK-1", "SCH-12a")
def test_the_others_go_on_when_sample_0_ends_with_its_first_token() -> None:
    door = Door(eos_token_ids=frozenset({9}))
    samples = door.add(PROMPT, n=3)
    assert door.commit(door.schedule(), forced={0: 9}) == [samples[0]]
    door.drain()
    assert [seq.num_completion_tokens for seq in samples] == [1, 4, 4]


@pytest.mark.spec("FRK-1", "SCH-9")
def test_samples_survive_the_preemption_of_a_prompt_in_chunks() -> None:
    door = Door(
        num_kvcache_blocks=6, max_num_batched_tokens=4, max_num_seqs=2, max_consecutive_prefills=1
    )
    door.add([1] * 6, max_tokens=9)
    door.step()
    samples = door.add([2] * 16, n=2, max_tokens=1)
    preempted = {seq for step in door.drain() for seq in step.preempted}
    assert samples[0] in preempted
    assert {seq.finish_reason for seq in samples} == {"length"}


@pytest.mark.spec("PFX-12", "FRK-2")
def test_without_prefix_caching_no_other_request_shares_with_samples() -> None:
    door = Door(enable_prefix_caching=False, num_kvcache_blocks=16)
    door.run(PROMPT, n=2)
    again = door.run(PROMPT, n=2)
    assert [seq.num_cached_tokens for seq in again] == [0, 8]
