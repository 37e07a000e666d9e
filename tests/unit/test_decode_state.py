"""Seats: what a decode step on a GPU need not be told again."""

from array import array

import numpy as np
import pytest
import torch

from nanovllm.engine.decode_state import NO_BLOCK, DecodeState, Seats
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledRow
from nanovllm.sampling_params import SamplingParams

NUM_SEATS, MAX_BLOCKS = 3, 4


def running(seq_id: int, blocks: list[int], **params: object) -> Sequence:
    seq = Sequence(seq_id, [1], SamplingParams(seed=seq_id, **params), block_size=2, max_tokens=9)
    seq.status = SequenceStatus.RUNNING
    seq.block_table.extend(blocks)
    return seq


def row(seq: Sequence) -> ScheduledRow:
    end = 2 * len(seq.block_table)
    return ScheduledRow(seq, end - 1, end, array("i", seq.block_table), True)


class Device:
    """The tensors, brought up to date as the runner does."""

    def __init__(self) -> None:
        self.seats = Seats(NUM_SEATS, MAX_BLOCKS)
        self.state = DecodeState(NUM_SEATS, MAX_BLOCKS, torch.device("cpu"))

    def step(self, *seqs: Sequence, decodes: bool = False) -> list[int]:
        """The seats of a step; afterwards every table on the device is its sequence's."""
        rows = [row(seq) for seq in seqs]
        seats, self.new_blocks, self.updates = self.seats.take(rows, decodes)
        flat = self.state.block_tables.view(-1)
        flat[self.updates.table_index] = torch.from_numpy(self.updates.table_value)
        for seat, seq, block in zip(seats, seqs, self.new_blocks, strict=True):
            if block != NO_BLOCK:
                self.state.block_tables[seat, len(seq.block_table) - 1] = int(block)
        for seat, seq in zip(seats, seqs, strict=True):
            table = self.state.block_tables[seat, : len(seq.block_table)]
            assert table.tolist() == seq.block_table.tolist()
        assert len(set(seats.tolist())) == len(seqs)
        return seats.tolist()


@pytest.mark.spec("KV-1", "SEQ-6")
def test_only_what_is_new_of_a_table_is_sent() -> None:
    device, seq = Device(), running(0, [7, 5])
    seat = device.step(seq)
    assert device.updates.table_value.tolist() == [7, 5]
    assert device.step(seq) == seat
    assert not len(device.updates.table_value)
    seq.block_table.append(9)
    device.step(seq)
    assert device.updates.table_value.tolist() == [9]


@pytest.mark.spec("KV-1")
def test_the_next_block_of_a_decode_goes_with_its_row() -> None:
    device, seq, other = Device(), running(0, [7]), running(1, [5, 4])
    device.step(seq, other, decodes=True)
    assert device.new_blocks.tolist() == [7, NO_BLOCK]
    assert device.updates.table_value.tolist() == [5, 4]
    seq.block_table.append(9)
    device.step(other, seq, decodes=True)
    assert device.new_blocks.tolist() == [NO_BLOCK, 9]
    assert not len(device.updates.table_value)
    device.step(other, seq, decodes=True)
    assert device.new_blocks.tolist() == [NO_BLOCK, NO_BLOCK]


@pytest.mark.spec("SCH-8", "KV-1")
def test_a_preempted_sequence_comes_back_with_other_blocks() -> None:
    device, seq, other = Device(), running(0, [0, 1]), running(1, [2])
    device.step(seq, other)
    device.seats.leave(seq)
    seq.block_table[:] = array("i", [3, 1, 0])
    device.step(other, seq)
    assert device.updates.table_value.tolist() == [3, 1, 0]


@pytest.mark.spec("SCH-3")
def test_those_who_have_ended_make_room_when_seats_are_short() -> None:
    device, old = Device(), [running(i, [i]) for i in range(NUM_SEATS)]
    seats = device.step(*old)
    old[1].status = SequenceStatus.FINISHED
    assert device.step(old[0], running(9, [1, 3]), old[2]) == seats


@pytest.mark.spec("SCH-3", "SCH-15")
def test_one_that_ended_since_its_row_was_planned_keeps_its_seat() -> None:
    device, old = Device(), [running(i, [i]) for i in range(NUM_SEATS)]
    first, second, third = device.step(*old)
    for seq in old[:2]:
        seq.status = SequenceStatus.FINISHED
    assert device.step(old[1], running(9, [1, 3]), old[2]) == [second, first, third]


@pytest.mark.spec("SCH-8")
def test_a_chunk_that_samples_nothing_leaves_no_token_on_the_device() -> None:
    seats, seq = Seats(NUM_SEATS, MAX_BLOCKS), running(0, [0])
    assert not seats.knows(seq)
    for samples in (False, True, False):
        seats.take([row(seq)._replace(samples=samples)], decodes=False)
        assert seats.knows(seq) == samples


@pytest.mark.spec("SMP-4")
def test_a_newcomer_brings_its_sampling() -> None:
    device = Device()
    device.step(running(0, [0]))
    seats = device.step(running(1, [1], temperature=0.5), running(2, [2], logprobs=3))
    assert device.updates.seats.tolist() == seats
    assert device.updates.temperature.tolist() == [0.5, 1.0]
    assert len(np.unique(device.updates.stream)) == 2
    assert device.seats.plain[seats].tolist() == [True, False]
