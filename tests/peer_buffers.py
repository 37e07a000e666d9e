"""Peer memory of several ranks without several GPUs: on one device, or in two processes."""

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import torch
from paged_rows import DEVICE

from nanovllm.kernels.peer_add_rms_norm import peer_add_rms_norm, peer_add_rms_norm_reference
from nanovllm.kernels.peer_all_reduce import (
    PeerBuffers,
    num_programs,
    peer_all_reduce,
    peer_all_reduce_reference,
)

CAPACITY = 2048


def make_buffers(size: int) -> tuple[torch.Tensor, list[PeerBuffers]]:
    """Memory [rank, half, sender, word], and what each rank has."""
    memory = torch.zeros(size, 2, size, CAPACITY, dtype=torch.int64, device=DEVICE)
    addresses = torch.tensor([part.data_ptr() for part in memory], device=DEVICE)
    return memory, [
        PeerBuffers(
            rank,
            size,
            CAPACITY,
            addresses,
            torch.zeros(num_programs(CAPACITY), dtype=torch.int32, device=DEVICE),
            torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )
        for rank in range(size)
    ]


def words_of(x: torch.Tensor, call: int) -> torch.Tensor:
    return (call << 32) | (x.view(torch.int32).long() & 0xFFFFFFFF)


def check_peer_all_reduce(size: int, dtype: torch.dtype) -> None:
    """Every rank gets the same sum, in calls of several lengths."""
    torch.manual_seed(size)
    memory, buffers = make_buffers(size)
    for call, length in enumerate((2, 2048, 1000, 1026), start=1):
        vectors = [torch.randn(length, device=DEVICE).to(dtype) for _ in range(size)]
        expected = peer_all_reduce_reference(vectors)
        words = torch.arange(length * dtype.itemsize // 4, device=DEVICE)
        for rank in range(size):
            # The first program has taken part in all calls, the last ones in the long ones only.
            calls = buffers[rank].calls.repeat_interleave(CAPACITY // num_programs(CAPACITY)) + 1
            calls = calls[words].long()
            for sender in range(size):
                sent = words_of(vectors[sender], 0) | (calls << 32)
                memory[rank, calls % 2, sender, words] = sent
        for rank in range(size):
            buffers[rank].aborted.fill_(1)  # one that looks elsewhere fails instead of waiting
            x = vectors[rank].clone()
            peer_all_reduce(x, buffers[rank])
            assert torch.equal(x, expected), (call, rank)
            assert buffers[rank].calls[0] == call


def check_peer_add_rms_norm(size: int, dtype: torch.dtype, width: int) -> None:
    """Every rank gets the same rows, of the sum with the residual and of its norm."""
    torch.manual_seed(width)
    memory, buffers = make_buffers(size)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    row_words = width * dtype.itemsize // 4
    for call, rows in enumerate((1, min(4, CAPACITY // row_words), 2), start=1):
        parts = [torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(size)]
        residual = torch.randn(rows, width, device=DEVICE).to(dtype)
        expected = peer_add_rms_norm_reference(parts, residual, weight, 1e-6)
        results = []
        for rank in range(size):
            calls = (buffers[rank].calls[:rows] + 1).repeat_interleave(row_words).long()
            words = torch.arange(rows * row_words, device=DEVICE)
            for sender in range(size):
                sent = words_of(parts[sender].view(-1), 0) | (calls << 32)
                memory[rank, calls % 2, sender, words] = sent
            buffers[rank].aborted.fill_(1)  # one that looks elsewhere fails instead of waiting
            before = parts[rank].clone(), residual.clone()
            results.append(peer_add_rms_norm(*before, weight, 1e-6, buffers[rank]))
            assert torch.equal(before[0], parts[rank])
            assert torch.equal(before[1], residual)
            assert buffers[rank].calls[0] == call
            assert torch.equal(results[rank][1], expected[1])
            assert torch.equal(results[rank][0], results[0][0])
        torch.testing.assert_close(results[0][0], expected[0])


WIDTH = 64


def run_two_ranks(lengths: list[int], first_call: int) -> tuple[list[list[float]], ...]:
    """What two ranks get that sum `[1, 2, ...]` and twice that, of each length, at any pace.

    Lengths of some rows of `WIDTH` are summed twice: zeros are added and they are normed besides.
    """
    context = multiprocessing.get_context("spawn")
    memory = SharedMemory(create=True, size=2 * 2 * 2 * 2 * CAPACITY * 8)
    started = []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (rank, memory.name, lengths, first_call, theirs)
            process = context.Process(target=_sum_as_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((ours, process))
        sums = tuple(ours.recv() if ours.poll(60) else [] for ours, _ in started)
    finally:
        for _, process in started:
            process.kill()
            process.join()
        memory.close()
        memory.unlink()
    return sums


def _sum_as_rank(
    rank: int,
    name: str,
    lengths: list[int],
    first_call: int,
    channel: Connection,
) -> None:
    shared = SharedMemory(name=name)
    memory = torch.frombuffer(shared.buf, dtype=torch.int64).view(2, 2, -1)
    for_sums, for_norms = (
        PeerBuffers(
            rank,
            2,
            CAPACITY,
            torch.tensor([part.data_ptr() for part in parts]),
            torch.full((num_programs(CAPACITY),), first_call - 1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        )
        for parts in memory
    )
    pace = random.Random(rank)
    sums = []
    for length in lengths:
        time.sleep(pace.random() / 20)
        x = torch.arange(1.0, length + 1) * (rank + 1)
        if length % WIDTH == 0 and length // WIDTH <= num_programs(CAPACITY):
            rows, zeros = x.clone().view(-1, WIDTH), torch.zeros(length // WIDTH, WIDTH)
            _, total = peer_add_rms_norm(rows, zeros, torch.ones(WIDTH), 1e-6, for_norms)
            sums.append(total.view(-1).tolist())
        peer_all_reduce(x, for_sums)
        sums.append(x.tolist())
    channel.send(sums)
