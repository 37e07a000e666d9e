"""Ranks that cannot write to each other's memory: they say so, keep nothing, and use NCCL."""

import logging
import pickle
from functools import partial
from typing import Any

import pytest
import torch

from nanovllm.engine.tensor_parallel import device_memory, peer_memory
from nanovllm.engine.tensor_parallel.peer_memory import meet_peers

CPU = torch.device("cpu")


class Store(dict[str, bytes]):
    """What ranks have told."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            raise RuntimeError(f"wait timeout: {key}")
        return self[key]


class Memory:
    """Of a rank, or mapped; adds itself to `made`."""

    address = 64
    handle = b"mine"

    def __init__(self, made: list["Memory"], what: int | bytes) -> None:
        if what == b"unreachable":
            raise RuntimeError("cuIpcOpenMemHandle_v2 returned CUDA error 201")
        self.freed = False
        made.append(self)

    def free(self) -> None:
        self.freed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    made: list[Memory] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(peer_memory, "SharedMemory", partial(Memory, made))
    monkeypatch.setattr(peer_memory, "MappedMemory", partial(Memory, made))
    return made


def told(store: Store, rank: int) -> tuple[str, bytes]:
    host, handle = pickle.loads(store[peer_memory._key(rank)])
    return host, handle


@pytest.mark.spec("TP-4")
@pytest.mark.parametrize(
    ("news", "cause"),
    [
        (None, "wait timeout"),
        ((peer_memory._host(), b""), "rank 1 has no memory to share"),
        (("another boot", b"theirs"), "rank 1 is on another host"),
        ((peer_memory._host(), b"unreachable"), "CUDA error 201"),
    ],
)
def test_a_rank_that_cannot_be_reached(
    made: list[Memory],
    news: tuple[str, bytes] | None,
    cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()
    if news is not None:
        store.set(peer_memory._key(1), pickle.dumps(news))
    with caplog.at_level(logging.WARNING):
        assert meet_peers(store, 0, 2, CPU) is None
    assert cause in caplog.text
    assert told(store, 0) == (peer_memory._host(), b"mine")
    assert [memory.freed for memory in made] == [True]


@pytest.mark.spec("TP-4")
def test_a_rank_without_memory_tells_the_others_at_once(
    made: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(num_bytes: int) -> Memory:
        raise RuntimeError("cuMemAlloc_v2 returned CUDA error 2")

    monkeypatch.setattr(peer_memory, "SharedMemory", full)
    store = Store()
    assert meet_peers(store, 0, 2, CPU) is None
    assert told(store, 0) == (peer_memory._host(), b"")
    assert not made


@pytest.mark.spec("TP-4")
def test_a_machine_without_the_driver_is_one_that_cannot() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the driver")
    with pytest.raises(RuntimeError, match="libcuda"):
        device_memory.SharedMemory(8)
