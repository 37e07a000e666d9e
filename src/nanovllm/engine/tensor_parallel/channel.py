"""Messages between rank 0 and another one, of any size (TP-5).

A channel is a `multiprocessing` connection: over a pair of sockets to a process that this one has
spawned, over TCP to one that was launched elsewhere. Its end tells that the process has ended.
"""

import os
import pickle
import secrets
import select
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any


def send_all(channels: Iterable[Connection], message: object) -> None:
    """Send the same to all. Raises OSError if one of them is closed."""
    payload = pickle.dumps(message, protocol=5)
    for channel in channels:
        channel.send_bytes(payload)


def receive(channel: Connection) -> Any:
    """The next message. Raises EOFError or OSError if there will be none."""
    return pickle.loads(channel.recv_bytes())


def wait_for_end(channel: Connection) -> None:
    """Return when the other side is closed, whether or not all messages were read."""
    poller = select.poll()
    # Not everywhere; where it is missing, a closed socket shows as POLLHUP, which is implied.
    poller.register(channel.fileno(), getattr(select, "POLLRDHUP", 0))
    poller.poll()


def hang_up(channel: Connection) -> None:
    """The other side sees the end now; on this one another thread may still use the channel."""
    with suppress(OSError), socket.socket(fileno=os.dup(channel.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Address:
    """Where rank 0 listens, and the secret that who comes there has to know."""

    host: str
    port: int
    secret: bytes


class Listener:
    """Rank 0's ear for ranks that were launched; a context manager.

    Args:
        host: to listen on; the system chooses the port.
        timeout: seconds that anyone may take to come.
    """

    def __init__(self, host: str, timeout: float) -> None:
        self._server = socket.create_server((host, 0))
        self._server.settimeout(timeout)
        port = self._server.getsockname()[1]
        self.address = Address(host, port, secrets.token_bytes(32))

    def accept(self, count: int) -> Iterator[tuple[int, Connection]]:
        """Rank and channel of the next `count` that come. Raises TimeoutError for one that fails
        to, and `multiprocessing.AuthenticationError` for one that does not know the secret."""
        for _ in range(count):
            channel = _connection(self._server.accept()[0])
            deliver_challenge(channel, self.address.secret)
            answer_challenge(channel, self.address.secret)
            yield receive(channel), channel

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()


def connect(address: Address, rank: int) -> Connection:
    """The channel of `rank` to who listens at `address`."""
    channel = _connection(socket.create_connection((address.host, address.port)))
    answer_challenge(channel, address.secret)
    deliver_challenge(channel, address.secret)
    send_all([channel], rank)
    return channel


def _connection(sock: socket.socket) -> Connection:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(sock.detach())
