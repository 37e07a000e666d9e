"""Sums by peer memory, one rank at a time."""

import pytest
import torch
from paged_rows import DEVICE
from peer_buffers import (
    CAPACITY,
    check_peer_add_rms_norm,
    check_peer_all_reduce,
    make_buffers,
    run_two_ranks,
    words_of,
)

from nanovllm.kernels.peer_add_rms_norm import takes_rows
from nanovllm.kernels.peer_all_reduce import peer_all_reduce


@pytest.mark.spec("TP-1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_same_sum(size: int, dtype: torch.dtype) -> None:
    check_peer_all_reduce(size, dtype)


@pytest.mark.spec("TP-1", "MOD-3", "MOD-4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "width"), [(2, 512), (3, 96), (2, 130)])
def test_every_rank_gets_the_same_sum_and_its_norm(
    size: int, width: int, dtype: torch.dtype
) -> None:
    check_peer_add_rms_norm(size, dtype, width)


@pytest.mark.spec("TP-1")
@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((1, 8), torch.float16, True),
        ((4, 1024), torch.float16, True),
        ((5, 8), torch.float16, False),  # more rows than programs have counters
        ((0, 8), torch.float16, False),
        ((2, 7), torch.float16, False),  # a word with halves of two rows
        ((2, 7), torch.float32, True),
        ((1, CAPACITY), torch.float32, True),
        ((1, CAPACITY + 1), torch.float32, False),
        ((2, 8), torch.float64, False),
        ((2, 2, 8), torch.float32, False),
    ],
)
def test_rows_that_one_kernel_can_sum_and_norm(
    shape: tuple[int, ...], dtype: torch.dtype, taken: bool
) -> None:
    buffers = make_buffers(2)[1][0]
    assert takes_rows(torch.zeros(shape, dtype=dtype, device=DEVICE), buffers) is taken


@pytest.mark.spec("TP-1")
def test_what_a_rank_sends_is_where_the_others_look_for_it() -> None:
    memory, buffers = make_buffers(3)
    x = torch.arange(1, 7, dtype=torch.int32, device=DEVICE).view(torch.float32)
    sent = words_of(x, 1)
    buffers[1].aborted.fill_(1)
    peer_all_reduce(x, buffers[1])
    for peer in (0, 2):
        assert torch.equal(memory[peer, 1, 1, :6], sent)
        assert not memory[peer, 0].any()
        assert not memory[peer, 1, [0, 2]].any()
        assert not memory[peer, 1, 1, 6:].any()
    assert not memory[1].any()


@pytest.mark.spec("TP-5")
def test_the_number_of_a_call_may_wrap_around() -> None:
    """After 2**31 calls, a day of decoding."""
    memory, buffers = make_buffers(2)
    buffers[0].calls.fill_(2**31 - 2)
    buffers[0].aborted.fill_(1)  # one that looks elsewhere fails instead of waiting
    for call in (2**31 - 1, -(2**31), 1 - 2**31):
        memory.fill_(-1)
        x = torch.ones(4, device=DEVICE)
        memory[0, call & 1, 1, :4] = words_of(x, call)
        peer_all_reduce(x, buffers[0])
        assert x.tolist() == [2.0] * 4
        assert buffers[0].calls[0] == call
        written = memory[1] != -1
        assert written[call & 1, 0, :4].all()
        assert written.sum() == 4


@pytest.mark.spec("TP-1")
@pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_two_gpus.py has two GPUs for it")
def test_ranks_that_run_when_they_like_wait_for_each_other() -> None:
    """Two processes on memory they share; neither has the other's words when it asks."""
    sums = run_two_ranks([6, 2048, 256, 600, 2, 64, 1500, 6, 128, 2048], first_call=2**31 - 3)
    lengths = [6, 2048, 256, 256, 600, 2, 64, 64, 1500, 6, 128, 128, 2048]
    for mine, theirs, length in zip(*sums, lengths, strict=True):
        assert mine == theirs == [3.0 * (i + 1) for i in range(length)]


@pytest.mark.spec("TP-4")
def test_an_abort_ends_the_waiting() -> None:
    _, buffers = make_buffers(2)
    buffers[0].aborted.fill_(1)
    peer_all_reduce(torch.ones(512, device=DEVICE), buffers[0])
    assert buffers[0].calls[0] == 1


@pytest.mark.spec("TP-5")
@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((2048,), torch.float32, True),
        ((2, 1024), torch.bfloat16, True),
        ((4096,), torch.float16, True),
        ((2049,), torch.float32, False),
        ((3,), torch.bfloat16, False),
    ],
)
def test_what_is_left_to_the_library(
    shape: tuple[int, ...], dtype: torch.dtype, taken: bool
) -> None:
    _, (buffers, _) = make_buffers(2)
    assert buffers.takes(torch.zeros(shape, dtype=dtype, device=DEVICE)) == taken
    assert not buffers.takes(torch.zeros(8, 8, device=DEVICE)[:, :4])
