"""Who computes what next: budget, seats, fairness, admission, preemption."""

from __future__ import annotations

import pytest
from core_door import Door

from nanovllm.config import SchedulerConfig
from nanovllm.engine.step import ScheduledStep, StepKind
from nanovllm.sampling_params import SamplingParams

POLICIES = ("prefill_first", "mixed")


def rows(step: ScheduledStep) -> dict[int, tuple[int, int]]:
    """`{seq_id: (start, count)}`."""
    return {row.seq.seq_id: (row.start, row.count) for row in step.rows}


@pytest.mark.spec("SCH-1")
@pytest.mark.parametrize("policy", POLICIES)
def test_first_come_first_served(policy: str) -> None:
    door = Door(max_num_seqs=2, policy=policy)
    for length in (3, 9, 1, 2):
        door.add([1] * length, max_tokens=2)
    first_rows = [
        seq_id for step in door.drain() for seq_id, (start, _) in rows(step).items() if start == 0
    ]
    assert first_rows == [0, 1, 2, 3]


@pytest.mark.spec("SCH-1")
def test_prefill_comes_before_decode() -> None:
    door = Door()
    door.add([1, 2])
    door.step()
    door.add([3, 4])
    kinds = [door.step().kind for _ in range(2)]
    assert kinds == [StepKind.PREFILL, StepKind.DECODE]


@pytest.mark.spec("SCH-1", "SCH-6")
@pytest.mark.parametrize("bound", [1, 3, 8])
def test_a_decode_waits_for_a_bounded_number_of_prefill_steps(bound: int) -> None:
    door = Door(max_num_seqs=64, num_kvcache_blocks=128, max_consecutive_prefills=bound)
    (decode,) = door.add([1], max_tokens=4)
    door.step()
    waited, waits = 0, []
    while not decode.is_finished:
        door.add([2, 2], max_tokens=4)
        step = door.step()
        if decode.seq_id in rows(step):
            waits.append(waited)
        waited = 0 if decode.seq_id in rows(step) else waited + 1
    assert max(waits) <= bound
    assert waits[1:] == [bound, bound]


@pytest.mark.spec("SCH-1")
def test_the_default_bound_is_eight() -> None:
    config = SchedulerConfig(1, 1, 2, 1, 1)
    assert (config.policy, config.max_consecutive_prefills) == ("prefill_first", 8)


@pytest.mark.spec("SCH-6")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_running_request_advances_under_endless_arrivals(policy: str) -> None:
    door = Door(max_num_seqs=4, num_kvcache_blocks=32, max_num_batched_tokens=4, policy=policy)
    (seq,) = door.add([1] * 3, max_tokens=10)
    num_steps = 0
    while not seq.is_finished:
        door.add([2] * 9, max_tokens=2)
        door.step()
        num_steps += 1
    assert num_steps <= 9 * 11


@pytest.mark.spec("SCH-2")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_budget_counts_computed_tokens_of_all_rows(policy: str) -> None:
    door = Door(max_num_batched_tokens=10, policy=policy)
    door.add([1] * 3)
    door.add([2] * 5)
    door.add([3] * 6)
    assert rows(door.step()) == {0: (0, 3), 1: (0, 5), 2: (0, 2)}
    expected = {2: (2, 4)} if policy == "prefill_first" else {0: (3, 1), 1: (5, 1), 2: (2, 4)}
    assert rows(door.step()) == expected


@pytest.mark.spec("SCH-2")
def test_cached_tokens_do_not_count_against_the_budget() -> None:
    door = Door(max_num_batched_tokens=5)
    door.run([1, 2, 3, 4] * 3, max_tokens=1)
    (seq,) = door.add([*([1, 2, 3, 4] * 3), 5, 5, 5])
    assert rows(door.step()) == {seq.seq_id: (12, 3)}


@pytest.mark.spec("SCH-2", "CFG-1")
def test_a_budget_below_the_seats_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=3 .* max_num_seqs=4"):
        Door(max_num_seqs=4, max_num_batched_tokens=3)


@pytest.mark.spec("SCH-3")
@pytest.mark.parametrize("policy", POLICIES)
def test_seats_bound_the_running_set_not_the_step(policy: str) -> None:
    door = Door(max_num_seqs=2, policy=policy)
    for _ in range(5):
        door.add([1, 2], max_tokens=3)
    door.add([1, 2], max_tokens=3, n=3)
    seen = []
    while door.live:
        door.step()
        seen.append(len(door.scheduler.running))
    assert max(seen) == 2


@pytest.mark.spec("SCH-4")
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_never_empty_and_one_a_sequence(policy: str) -> None:
    door = Door(max_num_seqs=3, max_num_batched_tokens=3, policy=policy)
    for length in (4, 1, 7, 8):
        door.add([1] * length)
    for step in door.drain():
        assert len(rows(step)) == len(step.rows)
        assert all(count >= 1 for _, count in rows(step).values())


@pytest.mark.spec("SCH-5")
@pytest.mark.parametrize("policy", POLICIES)
def test_idle_and_in_flight_give_an_empty_plan(policy: str) -> None:
    door = Door(policy=policy)
    assert (door.schedule().rows, door.schedule().kind) == ((), StepKind.IDLE)
    door.add([1, 2])
    step = door.schedule()
    assert not door.schedule().rows
    door.commit(step)
    door.drain()
    assert not door.schedule().rows
    assert door.scheduler.is_finished()


@pytest.mark.spec("SCH-5", "SCH-8")
def test_a_plan_is_not_empty_because_its_only_decode_was_preempted() -> None:
    """The newest decode needs a block in a decode step; an older sample is still in its prompt."""
    door = Door(
        kvcache_block_size=5,
        num_kvcache_blocks=2,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        max_consecutive_prefills=1,
    )
    leader, sample = door.add([1] * 5, n=2, max_tokens=1)
    (newest,) = door.add([2] * 5, max_tokens=2)
    steps = door.drain()
    preempting = next(step for step in steps if step.preempted == (newest,))
    assert rows(preempting) == {sample.seq_id: (3, 2)}
    assert leader.is_finished


@pytest.mark.spec("SCH-15")
def test_only_the_step_in_flight_can_be_committed() -> None:
    door = Door()
    door.add([1, 2])
    step = door.step()
    for late in (door.scheduler.commit, door.scheduler.fail_step):
        with pytest.raises(ValueError, match="step 0 is not the one in flight"):
            late(step, {})
    assert len(door.live) == 1
    door.drain()


@pytest.mark.spec("SCH-6")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_much_too_small_still_finishes_everything(policy: str, caching: bool) -> None:
    door = Door(num_kvcache_blocks=4, policy=policy, enable_prefix_caching=caching)
    for i in range(8):
        door.add([i + 1] * 5, max_tokens=8)
    door.drain()
    assert door.scheduler.stats.num_preemptions > 0
    assert door.scheduler.stats.num_computed_tokens <= 3 * 8 * (5 + 8 - 1)


# ---- what can never run ----------------------------------------------------------------------


@pytest.mark.spec("SCH-7a")
@pytest.mark.parametrize(
    ("p", "message"),
    [
        (0, "the prompt is empty: it has 0 tokens"),
        (20, "the prompt has 20 tokens; max_model_len is 20"),
        (25, "the prompt has 25 tokens; max_model_len is 20"),
        (17, r"the prompt has 17 tokens; the KV cache holds 16 \(4 blocks of 4\)"),
    ],
)
def test_impossible_prompts_are_refused_and_others_are_unaffected(p: int, message: str) -> None:
    door = Door(num_kvcache_blocks=4, max_model_len=20)
    (seq,) = door.add([1, 2])
    with pytest.raises(ValueError, match=message):
        door.add([1] * p, max_tokens=1)
    door.drain()
    assert seq.num_completion_tokens == 4
    assert door.scheduler.stats.num_requests == 1


@pytest.mark.spec("SCH-7b")
@pytest.mark.parametrize("max_tokens", [0, -3, 1.5, "4", True])
def test_max_tokens_is_an_integer_of_at_least_one(max_tokens: object) -> None:
    with pytest.raises(ValueError, match=f"max_tokens .*{max_tokens}"):
        SamplingParams(max_tokens=max_tokens)  # type: ignore[arg-type]


@pytest.mark.spec("SCH-7c")
@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_temperatures_are_finite_and_not_negative(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature .*{temperature}"):
        SamplingParams(temperature=temperature)


@pytest.mark.spec("SCH-7d")
def test_max_tokens_is_capped_by_the_model_and_refused_for_the_pool() -> None:
    door = Door(num_kvcache_blocks=4, max_model_len=20)
    assert door.run([1] * 15, max_tokens=2)[0].num_completion_tokens == 2
    message = r"15 prompt tokens and max_tokens=\d+ need 19 slots; the KV cache holds 16"
    with pytest.raises(ValueError, match=message):
        door.add([1] * 15, max_tokens=100)
    big = Door(num_kvcache_blocks=8, max_model_len=20)
    assert big.run([1] * 15, max_tokens=100)[0].num_completion_tokens == 5


@pytest.mark.spec("SCH-7d")
@pytest.mark.parametrize(("num_blocks", "outputs"), [(4, 3), (8, 6)])
def test_max_tokens_none_means_to_the_end_of_the_model_or_the_pool(
    num_blocks: int, outputs: int
) -> None:
    door = Door(num_kvcache_blocks=num_blocks, max_model_len=20)
    (seq,) = door.run([1] * 14, max_tokens=None)
    assert (seq.num_completion_tokens, seq.finish_reason) == (outputs, "length")
    assert door.scheduler.stats.num_preemptions == 0
