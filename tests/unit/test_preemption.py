"""Blocks run short, requests are aborted, steps fail, seats become free."""

from __future__ import annotations

import pytest
from core_door import Door
from test_scheduler import POLICIES, rows

from nanovllm.engine.step import ScheduledStep

EOS = 9


def step_that_preempts(door: Door) -> ScheduledStep:
    while not (step := door.step()).preempted:
        assert door.live, "nothing was preempted"
    return step


@pytest.mark.spec("SCH-8")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_newest_gives_way_and_keeps_its_completion(policy: str) -> None:
    door = Door(num_kvcache_blocks=3, policy=policy)
    (old,) = door.add([1] * 3, max_tokens=6)
    (new,) = door.add([2] * 3, max_tokens=6)
    step = step_that_preempts(door)
    assert step.preempted == (new,)
    assert rows(step).keys() == {old.seq_id}
    assert (new.num_completion_tokens, new.num_computed_tokens) == (2, 0)
    assert not new.block_table


@pytest.mark.spec("SCH-8")
def test_the_requester_is_the_victim_if_it_is_the_newest() -> None:
    door = Door(num_kvcache_blocks=3)
    (old,) = door.add([1] * 5, max_tokens=2)
    (new,) = door.add([2] * 4, max_tokens=2)
    door.step()
    step = door.step()
    assert step.preempted == (new,)
    assert rows(step).keys() == {old.seq_id}


@pytest.mark.spec("SCH-8")
def test_several_are_preempted_newest_first_until_there_is_room() -> None:
    door = Door(num_kvcache_blocks=6, enable_prefix_caching=False, kvcache_block_size=1)
    for token in (1, 2, 3):
        door.add([token, token], max_tokens=3)
    door.step()
    step = door.step()
    assert [seq.seq_id for seq in step.preempted] == [2]
    assert rows(step).keys() == {0, 1}
    victims = [seq.seq_id for step in door.drain() for seq in step.preempted]
    assert 0 not in victims


@pytest.mark.spec("SCH-8", "SCH-14")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_partly_prefilled_request_is_preemptible_and_its_full_blocks_stay(policy: str) -> None:
    door = Door(
        num_kvcache_blocks=6,
        max_num_batched_tokens=4,
        max_num_seqs=2,
        policy=policy,
        max_consecutive_prefills=1,
    )
    (old,) = door.add([1] * 6, max_tokens=9)
    door.step()
    (new,) = door.add([2] * 16, max_tokens=1)
    step = step_that_preempts(door)
    assert step.preempted == (new,)
    assert new.num_completion_tokens == 0
    published = set(door.published)
    assert {(2,) * 4, (2,) * 8} <= published
    door.drain()
    assert (old.num_completion_tokens, new.num_completion_tokens) == (9, 1)


@pytest.mark.spec("SCH-8", "SCH-10")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_request_runs_before_later_arrivals(policy: str) -> None:
    door = Door(num_kvcache_blocks=3, policy=policy)
    door.add([1] * 3, max_tokens=6)
    (new,) = door.add([2] * 3, max_tokens=6)
    step_that_preempts(door)
    (later,) = door.add([3], max_tokens=1)
    order = [seq_id for step in door.drain() for seq_id in rows(step)]
    assert order.index(new.seq_id) < order.index(later.seq_id)


@pytest.mark.spec("SCH-9")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_no_output(policy: str, caching: bool) -> None:
    door = Door(num_kvcache_blocks=5, policy=policy, enable_prefix_caching=caching)
    prompts = [[1, 2, 3], [2] * 6, [3, 1] * 4]
    seqs = [door.add(prompt, max_tokens=9)[0] for prompt in prompts]
    door.drain()
    assert door.scheduler.stats.num_preemptions >= 2
    alone = [Door().run(prompt, max_tokens=9)[0].token_ids for prompt in prompts]
    assert [seq.token_ids for seq in seqs] == alone


@pytest.mark.spec("SCH-11")
def test_running_requests_keep_their_order_in_the_batch() -> None:
    door = Door()
    for i in range(4):
        door.add([i + 1], max_tokens=3 + i)
    for step in door.drain():
        assert list(rows(step)) == sorted(rows(step))


@pytest.mark.spec("SCH-12a", "SCH-12b", "SCH-12c", "SCH-12d", "STP-2")
@pytest.mark.parametrize(
    ("token", "options", "outputs", "reason"),
    [
        (EOS, {}, 1, "stop"),
        (EOS, {"ignore_eos": True}, 4, "length"),
        (5, {}, 4, "length"),
        (5, {"stop_token_ids": (5,)}, 1, "stop"),
        (5, {"stop_token_ids": (5,), "ignore_eos": True}, 1, "stop"),
        (EOS, {"min_tokens": 2}, 3, "stop"),
        (EOS, {"min_tokens": 4}, 4, "length"),
        (EOS, {"max_tokens": 1}, 1, "stop"),
    ],
)
def test_what_ends_a_request_and_why(
    token: int, options: dict[str, object], outputs: int, reason: str
) -> None:
    door = Door(eos_token_ids=frozenset({EOS, 8}), alphabet=(token,))
    (seq,) = door.run([1, 2], **options)
    assert seq.completion_token_ids == [token] * outputs
    assert seq.finish_reason == reason


@pytest.mark.spec("SCH-12c", "SCH-12d")
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_stop_string_ends_and_keeps_its_tokens(max_tokens: int) -> None:
    door = Door()
    (seq,) = door.add([1, 2], max_tokens=max_tokens)
    assert door.commit(door.schedule(), stopped=[seq.seq_id]) == [seq]
    assert (seq.finish_reason, seq.num_completion_tokens) == ("stop", 1)


@pytest.mark.spec("SCH-13")
def test_abort_frees_everything_once_and_tells_whether_it_did() -> None:
    door = Door(max_num_seqs=1)
    (running,) = door.add([1] * 6)
    (waiting,) = door.add([2] * 6)
    door.step()
    assert door.abort(waiting.seq_id)
    assert door.abort(running.seq_id)
    assert door.blocks.num_free_blocks == 8
    assert not any(door.abort(i) for i in (running.seq_id, waiting.seq_id, 77))
    (done,) = door.run([3])
    assert not door.abort(done.seq_id)


@pytest.mark.spec("SCH-13")
def test_an_abort_in_flight_takes_effect_at_the_commit() -> None:
    door = Door()
    (seq,) = door.add([1] * 6)
    (other,) = door.add([2] * 6)
    step = door.schedule()
    assert door.abort(seq.seq_id)
    assert not door.abort(seq.seq_id)
    assert len(seq.block_table) == 2
    assert door.commit(step) == [seq]
    assert (seq.finish_reason, seq.num_completion_tokens) == ("abort", 0)
    assert other.num_completion_tokens == 1


@pytest.mark.spec("SCH-13", "SCH-15")
def test_an_aborted_request_of_a_step_that_fails_ends_once() -> None:
    door = Door()
    (seq,) = door.add([1] * 6)
    step = door.schedule()
    door.abort(seq.seq_id)
    assert door.fail_step(step) == [seq]
    assert door.scheduler.is_finished()


def chunked(p: int, budget: int, policy: str) -> tuple[list[tuple[int, int]], list[int]]:
    """Rows up to the first output, and all outputs, of one prompt under a budget."""
    door = Door(max_num_seqs=1, max_num_batched_tokens=budget, policy=policy)
    (seq,) = door.add([1, 2, 3] * 5 if p == 15 else [1] * p)
    spans = []
    while not seq.num_completion_tokens:
        spans += rows(door.step()).values()
    door.drain()
    return spans, seq.completion_token_ids


@pytest.mark.spec("SCH-14")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", range(1, 17))
def test_every_chunking_gives_the_same_output(policy: str, budget: int) -> None:
    spans, outputs = chunked(15, budget, policy)
    assert spans == [(i, min(budget, 15 - i)) for i in range(0, 15, budget)]
    assert outputs == chunked(15, 64, policy)[1]


@pytest.mark.spec("SCH-14")
@pytest.mark.parametrize("policy", POLICIES)
def test_admission_waits_for_blocks_of_all_known_tokens(policy: str) -> None:
    door = Door(num_kvcache_blocks=4, max_num_batched_tokens=5, max_num_seqs=2, policy=policy)
    door.add([1] * 5, max_tokens=3)
    door.step()
    (big,) = door.add([2] * 9, max_tokens=1)
    steps = door.drain()
    assert not any(step.preempted for step in steps)
    first = next(i for i, step in enumerate(steps) if big.seq_id in rows(step))
    assert first == 2


@pytest.mark.spec("SCH-15")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(policy: str) -> None:
    door = Door(max_num_seqs=2, policy=policy)
    seqs = [door.add([i + 1] * 6)[0] for i in range(3)]
    door.step()
    assert door.fail_step(door.schedule(), "device lost") == seqs[:2]
    assert [seq.finish_reason for seq in seqs] == ["error", "error", None]
    assert seqs[0].error == "device lost"
    assert door.blocks.num_free_blocks == 8
    door.drain()
    assert seqs[2].finish_reason == "length"


@pytest.mark.spec("SCH-15", "BLK-1")
def test_a_commit_that_raises_halfway_is_a_failed_step() -> None:
    door = Door()
    seqs = [door.add([i + 1] * 6, max_tokens=1 + i)[0] for i in range(3)]
    (waiting,) = door.add([9] * 29)
    step = door.schedule()
    with pytest.raises(KeyError):
        door.scheduler.commit(step, {0: 1})
    assert door.scheduler.fail_step(step, "no token") == seqs[1:]
    assert [seq.finish_reason for seq in seqs] == ["length", "error", "error"]
    assert door.blocks.num_free_blocks == 8
    assert [row.seq for row in door.scheduler.schedule().rows] == [waiting]


@pytest.mark.spec("SMP-5", "SCH-12d")
def test_a_row_without_finite_logits_ends_nobody_else() -> None:
    door = Door()
    bad, good = *door.add([1] * 6), *door.add([1] * 6)
    assert door.commit(door.schedule(), failed=[bad.seq_id]) == [bad]
    assert (bad.finish_reason, bad.error, bad.num_completion_tokens) == ("error", "NaN", 0)
    door.drain()
    assert good.finish_reason == "length"


@pytest.mark.spec("SCH-16")
@pytest.mark.parametrize("policy", POLICIES)
def test_seat_and_blocks_of_a_finished_request_serve_the_next_plan(policy: str) -> None:
    door = Door(max_num_seqs=2, num_kvcache_blocks=4, policy=policy)
    door.add([1] * 5, max_tokens=1)
    door.add([2] * 5, max_tokens=3)
    (third,) = door.add([3] * 5, max_tokens=1)
    assert rows(door.step()).keys() == {0, 1}
    assert third.seq_id in rows(door.step())
