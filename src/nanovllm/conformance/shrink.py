"""The smallest story that still shows a violation.

Operations are left out in chunks, then requests and the world are made plainer, as long as the same
requirement fails. Stories are lists of concrete operations, so that leaving one out changes nothing
about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic

from nanovllm.conformance.examination import Failure
from nanovllm.conformance.operations import Abort, Add, Operation
from nanovllm.conformance.protocol import RequestOptions, World
from nanovllm.conformance.session import Session

Trial = Callable[[World, list[Operation]], Failure | None]
Story = tuple[World, list[Operation]]


def shrink(failure: Failure, trial: Trial, *, trials: int = 600, seconds: float = 20.0) -> Failure:
    """The smallest failure that is found by so many trials, so that it is the same every time.

    Args:
        trial: lives through a story; the failure if it shows the same requirement's.
        seconds: gives up earlier on a slow engine.
    """
    deadline = monotonic() + seconds
    improved = True
    while improved:
        improved = False
        for candidate in _smaller(failure[0]):
            trials -= 1
            if trials < 0 or monotonic() > deadline:
                return failure
            found = trial(*candidate)
            if found is not None and size(found[0]) < size(failure[0]):
                failure, improved = found, True
                break
    return failure


def size(session: Session) -> tuple[int, ...]:
    """Shorter is better, then smaller requests, then fewer peculiarities, then a smaller world."""
    adds = [operation for operation in session.operations if isinstance(operation, Add)]
    world = session.world
    return (
        len(session.operations),
        sum(len(add.prompt) + abs(add.max_tokens) for add in adds),
        sum(add.options.n for add in adds),
        sum((add.options != RequestOptions()) + len(add.forced) + add.seed for add in adds),
        sum(sum(add.prompt) for add in adds),
        sum(add.request for add in adds),
        world.hash != "real",
        not world.prefix_cache,
        world.num_blocks * world.block_size,
        world.num_blocks,
        world.max_num_seqs,
        abs(world.max_num_batched_tokens - 16),
    )


def _smaller(session: Session) -> Iterator[Story]:
    world, operations = session.world, session.asked
    step = len(operations)
    while step:
        for start in range(0, len(operations), max(1, step // 2)):
            yield world, operations[:start] + operations[start + step :]
        step //= 2
    for i, operation in enumerate(operations):
        if isinstance(operation, Add):
            for plainer in _plainer(operation):
                yield world, [*operations[:i], plainer, *operations[i + 1 :]]
    yield world, _renumbered(operations)
    for smaller in _worlds(world):
        yield smaller, operations


def _renumbered(operations: list[Operation]) -> list[Operation]:
    """Requests from 0 on, in order of arrival."""
    adds = [operation.request for operation in operations if isinstance(operation, Add)]
    numbers = {request: i for i, request in enumerate(adds)}
    return [
        replace(operation, request=numbers.get(operation.request, operation.request))
        if isinstance(operation, Add | Abort)
        else operation
        for operation in operations
    ]


def _plainer(add: Add) -> Iterator[Add]:
    p = len(add.prompt)
    step = p // 2
    while step:
        for start in range(0, p, step):
            yield replace(add, prompt=add.prompt[:start] + add.prompt[start + step :])
        step //= 2
    for max_tokens in range(1, add.max_tokens):
        yield replace(add, max_tokens=max_tokens)
    for n in range(1, add.options.n):
        yield replace(add, options=replace(add.options, n=n))
    yield replace(add, options=RequestOptions(), forced={}, seed=0)
    yield replace(add, options=RequestOptions())
    yield replace(add, forced={}, seed=0)
    yield replace(add, prompt=(1,) * p)
    for i, token in enumerate(add.prompt):
        if token > 1:
            yield replace(add, prompt=(*add.prompt[:i], 1, *add.prompt[i + 1 :]))


def _worlds(world: World) -> Iterator[World]:
    yield replace(world, hash="real", prefix_cache=True)
    for num_blocks in range(1, world.num_blocks):
        yield replace(world, num_blocks=num_blocks)
    for block_size in range(1, world.block_size):
        yield replace(world, block_size=block_size)
    for seats in range(1, world.max_num_seqs):
        yield replace(world, max_num_seqs=seats)
    yield replace(world, max_num_batched_tokens=16)
