"""One request: tokens, blocks, states."""

import pytest
from core_door import Door

from nanovllm.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


def sequence(num_prompt: int, num_completion: int = 0, block_size: int = 4) -> Sequence:
    seq = Sequence(
        7, list(range(num_prompt)), SamplingParams(), block_size=block_size, max_tokens=8
    )
    for token in range(num_completion):
        seq.append_token(100 + token)
    return seq


@pytest.mark.spec("SEQ-1")
def test_ids_are_unique_and_increase_in_order_of_arrival() -> None:
    door = Door()
    first = door.run([1, 2])
    samples = door.add([1, 2], n=3)
    last = door.add([1, 2])
    assert [seq.seq_id for seq in (*first, *samples, *last)] == [0, 1, 2, 3, 4]


@pytest.mark.spec("SEQ-2")
def test_states_of_a_request_that_is_preempted_and_ends() -> None:
    door = Door(num_kvcache_blocks=3)
    old, new = *door.add([1] * 4, max_tokens=6), *door.add([2] * 4, max_tokens=3)
    assert new.status is SequenceStatus.WAITING
    door.step()
    assert new.status is SequenceStatus.RUNNING
    assert door.step().preempted == (new,)
    assert new.status is SequenceStatus.WAITING
    door.drain()
    assert old.status is new.status is SequenceStatus.FINISHED
    assert old.is_finished
    assert not door.abort(new.seq_id)
    assert (new.status, new.finish_reason) == (SequenceStatus.FINISHED, FinishReason.LENGTH)


@pytest.mark.spec("SEQ-2", "SCH-13")
def test_abort_ends_waiting_and_running() -> None:
    door = Door(max_num_seqs=1)
    running, waiting = *door.add([1, 2]), *door.add([1, 2])
    door.step()
    for seq in (waiting, running):
        assert door.abort(seq.seq_id)
        assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, FinishReason.ABORT)


@pytest.mark.spec("SEQ-3")
@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "in_last_block"),
    [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (9, 3, 1)],
)
def test_number_of_blocks(num_tokens: int, num_blocks: int, in_last_block: int) -> None:
    for num_prompt in range(1, num_tokens + 1):
        seq = sequence(num_prompt, num_tokens - num_prompt)
        assert (seq.num_blocks, seq.last_block_num_tokens) == (num_blocks, in_last_block)
    one = sequence(num_tokens, block_size=1)
    assert (one.num_blocks, one.last_block_num_tokens) == (num_tokens, 1)


@pytest.mark.spec("SEQ-4")
def test_blocks_are_consecutive_slices_the_last_possibly_short() -> None:
    seq = sequence(6, 3)
    assert [seq.block(i) for i in range(3)] == [[0, 1, 2, 3], [4, 5, 100, 101], [102]]
    for i in (-1, 3):
        with pytest.raises(IndexError, match=f"block {i} of a sequence of 3"):
            seq.block(i)


@pytest.mark.spec("SEQ-5")
def test_prompt_and_completion_partition_the_tokens() -> None:
    seq = sequence(3, 2)
    assert seq.prompt_token_ids == [0, 1, 2]
    assert seq.completion_token_ids == [100, 101]
    assert seq.token_ids == [0, 1, 2, 100, 101]
    assert (seq.num_prompt_tokens, seq.num_completion_tokens, len(seq)) == (3, 2, 5)
    assert seq.num_tokens == seq.num_uncomputed_tokens == 5


@pytest.mark.spec("SEQ-5")
def test_the_callers_list_is_copied_both_ways() -> None:
    mine = [1, 2, 3]
    seq = Sequence(0, mine, SamplingParams(), block_size=4, max_tokens=8)
    mine.append(4)
    assert seq.token_ids == [1, 2, 3]
    seq.append_token(9)
    assert mine == [1, 2, 3, 4]
    seq.prompt_token_ids.append(5)
    assert seq.token_ids == [1, 2, 3, 9]


@pytest.mark.spec("SEQ-7")
def test_two_engines_of_different_block_sizes_work_side_by_side() -> None:
    prompts = [[1, 2, 3] * 3, [1, 2, 3] * 2]
    alone = [Door(kvcache_block_size=bs).run(prompts[0])[0].token_ids for bs in (2, 4)]
    doors = [Door(kvcache_block_size=bs) for bs in (2, 4)]
    seqs = [door.add(prompts[0])[0] for door in doors]
    while any(not seq.is_finished for seq in seqs):
        for door in doors:
            door.step()
    assert [seq.token_ids for seq in seqs] == alone
    assert [seq.num_blocks for seq in seqs] == [7, 4]


def test_repr_tells_state_and_progress() -> None:
    assert repr(sequence(3, 2)) == "Sequence(7, WAITING, tokens=3+2, computed=0)"
