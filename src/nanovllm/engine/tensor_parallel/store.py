"""The key-value store over which ranks find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

torch_distributed: Any = dist  # its stubs leave out most of what is used here

LOCAL_HOST = "127.0.0.1"

STORE_TIMEOUT = timedelta(seconds=8)
"""For what the others tell in the store: they run already when a group is made."""

LAUNCH_TIMEOUT = timedelta(minutes=5)
"""For all ranks that are launched to meet."""


class Store(Protocol):
    """A key-value store of torch, over which ranks meet."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...


def new_store() -> tuple[Store, int]:
    """A store in this process, and its port, which the system chooses."""
    store = torch_distributed.TCPStore(
        LOCAL_HOST, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT
    )
    return store, store.port


def store_at(port: int) -> Store:
    """The store that another process of this host has."""
    store: Store = torch_distributed.TCPStore(LOCAL_HOST, port, timeout=STORE_TIMEOUT)
    return store


def launched_store() -> Store:
    """The store of all ranks that were launched together (`env://`); waits for them."""
    store: Store = next(torch_distributed.rendezvous("env://", timeout=LAUNCH_TIMEOUT))[0]
    return store
