"""The sum of every rank's vector, by writing straight into the memory of the others.

A decode step has two sums a layer, each of a few hundred KiB: what they cost is latency, and a
library's ring takes 20 us. Here a rank sends every four bytes of its vector to all others as an
eight-byte word, the other half of which is the number of the call, and adds up the words that the
others sent when all of them have come. A word arrives whole, so that no fence and no barrier is
needed; the protocol is NCCL's "LL" (Hu et al., "Demystifying NCCL", 2025).

Words of one call and of the next one go to different halves of the buffer. Two halves are enough: a
rank that sends for call n has all words of call n - 1, whose senders were done with call n - 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nanovllm.kernels._triton import cdiv, jit, tl
from nanovllm.kernels.early_launch import wait_for_inputs

_BLOCK = 512
"""Words of one program."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PeerBuffers(NamedTuple):
    """What a rank calls `peer_all_reduce` with, or `peer_add_rms_norm`, but not both.

    Attributes:
        rank, size: of the ranks.
        capacity: words of the longest vector, a multiple of the words of a program.
        addresses: int64 [size], where each rank's buffer, int64 [2, size, capacity], is found from
            this rank's device; all zeros at first.
        calls: int32 [capacity / words of a program], zeros at first: the calls that a program has
            taken part in; it may wrap around.
        aborted: int32 [1] on the device; not 0 ends all waiting, and the sums are void.
    """

    rank: int
    size: int
    capacity: int
    addresses: torch.Tensor
    calls: torch.Tensor
    aborted: torch.Tensor

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """By name, of a kernel that calls `sum_of_ranks` with words of this dtype."""
        return {
            "addresses": self.addresses,
            "calls": self.calls,
            "aborted": self.aborted,
            "DTYPE": getattr(tl, str(dtype).removeprefix("torch.")),
            "RANK": self.rank,
            "SIZE": self.size,
            "CAPACITY": self.capacity,
        }

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `peer_all_reduce` can do it: not too long, and whole words of floats."""
        whole = x.is_contiguous() and x.nbytes % 4 == 0 and x.data_ptr() % 4 == 0
        return x.dtype in _DTYPES and x.nbytes <= 4 * self.capacity and whole


def num_programs(capacity: int) -> int:
    """The most programs of a kernel: the length of `PeerBuffers.calls`."""
    assert capacity % _BLOCK == 0, capacity
    return capacity // _BLOCK


def peer_all_reduce_reference(vectors: list[torch.Tensor]) -> torch.Tensor:
    """What `peer_all_reduce` leaves in the vector of every rank."""
    total = vectors[0].float()
    for x in vectors[1:]:
        total = total + x.float()
    return total.to(vectors[0].dtype)


def peer_all_reduce(x: torch.Tensor, buffers: PeerBuffers) -> None:
    """Overwrites x, of any shape, in fp32, fp16 or bf16, by the sum of the x of all ranks.

    Every rank adds in the same order and so gets the same bits. All ranks have to make the same
    calls with x of equal sizes. What `buffers.takes` refuses must not be passed.
    """
    assert buffers.takes(x), (x.shape, x.dtype, x.stride())
    words = x.view(-1).view(torch.int32)
    _peer_all_reduce_kernel[(cdiv(len(words), _BLOCK),)](
        words,
        num_words=len(words),
        **buffers.arguments(x.dtype),
        BLOCK=_BLOCK,
        num_warps=4,
        launch_pdl=True,
    )


@jit
def _peer_all_reduce_kernel(
    x,
    addresses,
    calls,
    aborted,
    num_words,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_inputs()
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_words
    mine = tl.load(x + i, inside, 0)
    call = calls + program
    low, high = sum_of_ranks(mine, i, inside, addresses, call, aborted, DTYPE, RANK, SIZE, CAPACITY)
    tl.store(x + i, to_word(low, high, DTYPE), inside)


@jit
def sum_of_ranks(
    mine,
    i,
    inside,
    addresses,
    calls,
    aborted,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Sends the words `mine`, which are the vector's i-th, and adds up those of all ranks.

    Args:
        calls: pointer to this program's number of calls.

    Returns:
        fp32 sums of the first values of the words, and of the second ones.
    """
    call = tl.load(calls) + 1
    half = (call & 1) * (SIZE * CAPACITY)  # the number wraps around, and % would become -1
    sent = (call.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, SIZE):
        peer = (RANK + step) % SIZE
        to = tl.load(addresses + peer).to(tl.pointer_type(tl.int64)) + half + RANK * CAPACITY
        tl.store(to + i, sent, inside)

    received = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)) + half
    low = tl.zeros(mine.shape, tl.float32)
    high = tl.zeros(mine.shape, tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            words = mine
        else:
            words = _wait_for(received + peer * CAPACITY + i, inside, call, aborted)
        low += first_value(words, DTYPE)
        high += second_value(words, DTYPE)
    tl.store(calls, call)
    return low, high


@jit
def _wait_for(words, inside, call, aborted):
    """The words at these pointers, when they are those of this call."""
    got = tl.load(words, inside, 0, volatile=True)
    missing = tl.sum((inside & ((got >> 32) != call)).to(tl.int32), 0)
    while missing > 0:
        got = tl.load(words, inside, 0, volatile=True)
        missing = tl.sum((inside & ((got >> 32) != call)).to(tl.int32), 0)
        if tl.load(aborted, volatile=True) != 0:
            missing = 0
    return got.to(tl.int32)


@jit
def first_value(words, DTYPE: tl.constexpr):
    """The first value in a word; the only one if it has four bytes."""
    if DTYPE.primitive_bitwidth == 32:
        value = words.to(DTYPE, bitcast=True)
    else:
        value = words.to(tl.int16).to(DTYPE, bitcast=True)
    return value.to(tl.float32)


@jit
def second_value(words, DTYPE: tl.constexpr):
    """The second one; anything if there is none."""
    if DTYPE.primitive_bitwidth == 32:
        value = words
    else:
        value = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return value.to(tl.float32)


@jit
def to_word(low, high, DTYPE: tl.constexpr):
    if DTYPE.primitive_bitwidth == 32:
        word = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16) | first
    return word
