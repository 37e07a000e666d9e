"""Which way a collective goes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peer_buffers import CAPACITY, make_buffers

from nanovllm.engine.tensor_parallel import group
from nanovllm.engine.tensor_parallel.group import RankGroup
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.parallel import TensorParallel


class Backend:
    """Remembers what it reduced."""

    def __init__(self) -> None:
        self.reduced: list[torch.Tensor] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        self.reduced += tensors


@pytest.mark.spec("TP-1", "TP-5")
def test_only_short_sums_go_over_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, summed = Backend(), []
    monkeypatch.setattr(group, "peer_all_reduce", lambda x, buffers: summed.append(x))
    peers = SimpleNamespace(for_sums=make_buffers(2)[1][0])
    ranks = RankGroup(backend)
    ranks.peers = peers
    tp = TensorParallel(0, 2, ranks)
    short, long = torch.zeros(CAPACITY), torch.zeros(CAPACITY + 1)
    assert tp.all_reduce(short) is short
    assert [id(x) for x in summed] == [id(short)]
    assert not backend.reduced
    tp.all_reduce(long)
    tp.minimum(3, torch.device("cpu"))
    assert len(summed) == 1
    assert [x.shape for x in backend.reduced] == [long.shape, (1,)]


@pytest.mark.spec("TP-1", "TP-7")
def test_a_norm_sums_by_its_own_kernel_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, normed = Backend(), []
    ranks = RankGroup(backend)
    tp = TensorParallel(0, 2, ranks)
    norm = RMSNorm(8, 1e-6, tp=tp)
    norm.weight.data.fill_(1.0)
    few, many = torch.ones(2, 8), torch.ones(CAPACITY, 8)
    both = norm(few, few)
    assert [x.shape for x in backend.reduced] == [few.shape]
    monkeypatch.setattr(group, "peer_add_rms_norm", lambda *args: normed.append(args) or both)
    ranks.peers = SimpleNamespace(for_norms=make_buffers(2)[1][0], for_sums=make_buffers(2)[1][0])
    assert norm(few, few) is both
    assert len(backend.reduced) == 1
    assert len(normed) == 1
    norm(many, many)
    assert [x.shape for x in backend.reduced] == [few.shape, many.shape]
    norm(few)
    assert len(normed) == 1


@pytest.mark.spec("TP-1")
def test_without_peers_all_go_over_the_backend() -> None:
    backend = Backend()
    TensorParallel(0, 2, RankGroup(backend)).all_reduce(torch.zeros(2))
    assert len(backend.reduced) == 1
