"""Vocabulary-parallel embedding and head: odd vocabularies are padded, and nobody sees it."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.parallel import TensorParallel

HIDDEN = 6


@pytest.fixture
def single_process(monkeypatch) -> None:
    """Lets one process play each rank in turn: partial results come back as they are."""
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)
    monkeypatch.setattr(TensorParallel, "all_gather", lambda self, x: x)


def table(vocab_size: int) -> torch.Tensor:
    return torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(0))


def build(layer_type, weight: torch.Tensor, tp: TensorParallel):
    layer = layer_type(weight.size(0), weight.size(1), tp)
    layer.weight.data.fill_(torch.nan)
    layer.weight.weight_loader(layer.weight, weight)
    return layer


@pytest.mark.spec("TP-3a", "TP-6")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [12, 13, 5])
def test_rows_concatenate_and_the_padding_is_zero(size, vocab_size):
    weight = table(vocab_size)
    shards = [
        build(VocabParallelEmbedding, weight, TensorParallel(rank, size)).weight
        for rank in range(size)
    ]
    assert len({shard.shape for shard in shards}) == 1
    rows = torch.cat(list(shards))
    assert torch.equal(rows[:vocab_size], weight)
    assert torch.equal(rows[vocab_size:], torch.zeros(len(rows) - vocab_size, HIDDEN))


@pytest.mark.spec("TP-3a", "TP-6")
@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_id_is_embedded_by_exactly_one_rank(size):
    weight, ids = table(13), torch.tensor([12, 0, 3, 3, 7, 11, 6, 4])
    before = ids.clone()
    parts = [
        build(VocabParallelEmbedding, weight, TensorParallel(rank, size))(ids)
        for rank in range(size)
    ]
    assert torch.equal(sum(parts), F.embedding(ids, weight))
    assert torch.equal(ids, before)


@pytest.mark.spec("TP-3a")
@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_side_by_side_are_the_whole_heads(size):
    weight = table(13)
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    parts = [
        build(ParallelLMHead, weight, TensorParallel(rank, size))(hidden) for rank in range(size)
    ]
    logits = torch.cat(parts, -1)[:, :13]
    torch.testing.assert_close(logits, hidden @ weight.T)


@pytest.mark.spec("TP-3a")
def test_padding_logits_are_cut_off(monkeypatch):
    monkeypatch.setattr(TensorParallel, "all_gather", lambda self, x: x.repeat(1, self.size))
    head = build(ParallelLMHead, table(13), TensorParallel(0, 2))
    assert head(torch.zeros(3, HIDDEN)).shape == (3, 13)


@pytest.mark.spec("LOD-2")
@pytest.mark.parametrize("shape", [(12, HIDDEN), (14, HIDDEN), (13, HIDDEN + 1)])
def test_a_mis_shaped_table_is_refused_with_both_shapes(shape):
    layer = VocabParallelEmbedding(13, HIDDEN, TensorParallel(1, 2))
    with pytest.raises(ValueError) as refused:
        layer.weight.weight_loader(layer.weight, torch.zeros(shape))
    assert str(shape) in str(refused.value)
    assert str((13, HIDDEN)) in str(refused.value)
