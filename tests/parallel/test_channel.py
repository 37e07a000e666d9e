"""Messages between ranks, and the end of a channel."""

import threading
from contextlib import closing
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from nanovllm.engine.interrupts import interrupts_held
from nanovllm.engine.tensor_parallel.channel import (
    Address,
    Listener,
    connect,
    hang_up,
    receive,
    send_all,
    wait_for_end,
)

LIMIT = 10.0


@pytest.fixture
def pair():
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        yield ours, theirs


def start(target, *args) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


@pytest.mark.spec("TP-5")
def test_a_message_is_as_large_as_it_is(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    sent = np.arange(2**22)
    sender = start(send_all, [ours], ("compute", sent))
    method, received = receive(theirs)
    sender.join(LIMIT)
    assert method == "compute"
    assert np.array_equal(received, sent)


@pytest.mark.spec("TP-4")
def test_the_end_is_noticed_before_all_is_read(pair: tuple[Connection, Connection]) -> None:
    ours, theirs = pair
    send_all([ours], "unread")
    waiting = start(wait_for_end, theirs)
    assert waiting.is_alive()
    ours.close()
    waiting.join(LIMIT)
    assert not waiting.is_alive()
    assert receive(theirs) == "unread"
    with pytest.raises(EOFError):
        receive(theirs)


@pytest.mark.spec("TP-4")
def test_hanging_up_ends_the_channel_for_a_thread_that_reads_it(
    pair: tuple[Connection, Connection],
) -> None:
    ours, theirs = pair
    waiting = start(wait_for_end, theirs)
    hang_up(ours)
    waiting.join(LIMIT)
    assert not waiting.is_alive()
    hang_up(ours)


@pytest.mark.spec("TP-4")
def test_only_who_knows_the_secret_is_heard() -> None:
    with Listener("127.0.0.1", LIMIT) as listener:
        right = listener.address
        wrong = Address(right.host, right.port, b"guessed")
        failures = []

        def guess() -> None:
            try:
                connect(wrong, 1)
            except AuthenticationError as error:
                failures.append(error)

        guesser = start(guess)
        with pytest.raises(AuthenticationError):
            list(listener.accept(1))
        guesser.join(LIMIT)
        assert len(failures) == 1

        start(connect, right, 3)
        ((rank, channel),) = listener.accept(1)
        assert rank == 3
        channel.close()


@pytest.mark.spec("TP-4")
def test_nobody_comes() -> None:
    with Listener("127.0.0.1", timeout=0.01) as listener, pytest.raises(TimeoutError):
        list(listener.accept(1))


@pytest.mark.spec("TP-4")
def test_interrupts_can_be_held_where_there_are_none() -> None:
    """Only the main thread gets them, and only it may say what is done with them."""
    held = []

    def hold() -> None:
        with interrupts_held():
            held.append(True)

    start(hold).join(LIMIT)
    assert held == [True]
