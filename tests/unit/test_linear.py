"""The five parallel linears: each rank's part, against the whole layer (TP-3, TP-6)."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.parallel import TensorParallel

SIZES = [1, 2, 4]


def ranks(size: int) -> list[TensorParallel]:
    return [TensorParallel(rank, size) for rank in range(size)]


def load(layer: LinearBase, weight: torch.Tensor, bias: torch.Tensor, shard_id=None) -> None:
    layer.weight.weight_loader(layer.weight, weight, shard_id)
    layer.bias.weight_loader(layer.bias, bias, shard_id)


@pytest.fixture
def randn() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.spec("TP-6")
@pytest.mark.parametrize("size", SIZES)
def test_replicated_is_the_whole_layer_on_every_rank(size, randn):
    x, weight, bias = randn(3, 8), randn(12, 8), randn(12)
    for tp in ranks(size):
        layer = ReplicatedLinear(8, 12, tp, bias=True)
        load(layer, weight, bias)
        torch.testing.assert_close(layer(x), F.linear(x, weight, bias))


@pytest.mark.spec("TP-6")
@pytest.mark.parametrize("size", SIZES)
def test_column_outputs_concatenate(size, randn):
    x, weight, bias = randn(3, 8), randn(12, 8), randn(12)
    outputs = []
    for tp in ranks(size):
        layer = ColumnParallelLinear(8, 12, tp, bias=True)
        load(layer, weight, bias)
        outputs.append(layer(x))
    torch.testing.assert_close(torch.cat(outputs, -1), F.linear(x, weight, bias))


@pytest.mark.spec("TP-6")
@pytest.mark.parametrize("size", SIZES)
def test_merged_column_keeps_each_parts_slice_together(size, randn):
    x, weights, biases = randn(3, 8), [randn(12, 8), randn(4, 8)], [randn(12), randn(4)]
    outputs = []
    for tp in ranks(size):
        layer = MergedColumnParallelLinear(8, [12, 4], tp, bias=True)
        for part in (1, 0):
            load(layer, weights[part], biases[part], part)
        outputs.append(layer(x).split([12 // size, 4 // size], dim=-1))
    for part in (0, 1):
        whole = torch.cat([output[part] for output in outputs], -1)
        torch.testing.assert_close(whole, F.linear(x, weights[part], biases[part]))


@pytest.mark.spec("TP-3b", "TP-6")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_query_head_finds_its_kv_head_on_its_own_rank(size, kv_heads, randn):
    heads, dim, hidden = 4, 2, 6
    x = randn(3, hidden)
    total = {"q": heads, "k": kv_heads, "v": kv_heads}
    weights = {part: randn(n * dim, hidden) for part, n in total.items()}
    biases = {part: randn(n * dim) for part, n in total.items()}
    expected = {part: F.linear(x, weights[part], biases[part]).view(3, -1, dim) for part in total}
    for tp in ranks(size):
        layer = QKVParallelLinear(hidden, dim, heads, kv_heads, tp, bias=True)
        for part in total:
            load(layer, weights[part], biases[part], part)
        q, k, v = layer(x).view(3, -1, dim).split(layer.part_heads, dim=1)
        assert q.size(1) == heads // size
        assert k.size(1) == v.size(1) == max(1, kv_heads // size)
        for local in range(q.size(1)):
            query = tp.rank * q.size(1) + local
            kv, local_kv = query * kv_heads // heads, local * k.size(1) // q.size(1)
            torch.testing.assert_close(q[:, local], expected["q"][:, query])
            torch.testing.assert_close(k[:, local_kv], expected["k"][:, kv])
            torch.testing.assert_close(v[:, local_kv], expected["v"][:, kv])


@pytest.mark.spec("TP-6")
@pytest.mark.parametrize("size", SIZES)
def test_row_partial_outputs_sum_with_the_bias_once(size, randn, monkeypatch):
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)
    x, weight, bias = randn(3, 8), randn(12, 8), randn(12)
    total = torch.zeros(3, 12)
    for tp in ranks(size):
        layer = RowParallelLinear(8, 12, tp, bias=True)
        load(layer, weight, bias)
        total += layer(x.chunk(size, dim=-1)[tp.rank])
    torch.testing.assert_close(total, F.linear(x, weight, bias))


@pytest.mark.spec("TP-3c")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda tp: ColumnParallelLinear(8, 10, tp), r"output_size = 10 .* 4 ranks"),
        (lambda tp: MergedColumnParallelLinear(8, [8, 6], tp), r"output_size = 6 .* 4 ranks"),
        (lambda tp: RowParallelLinear(6, 8, tp), r"input_size = 6 .* 4 ranks"),
        (lambda tp: QKVParallelLinear(8, 2, 6, 2, tp), r"num_attention_heads = 6 .* 4 ranks"),
        (lambda tp: QKVParallelLinear(8, 2, 12, 6, tp), r"num_key_value_heads = 6 .* 4 ranks"),
        (lambda tp: QKVParallelLinear(8, 2, 12, 3, tp), r"num_key_value_heads = 3 .* 4 ranks"),
    ],
)
def test_what_cannot_split_is_refused_with_its_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build(TensorParallel(0, 4))


@pytest.mark.spec("TP-3c")
@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank, size):
    with pytest.raises(ValueError, match=f"rank {rank}, size {size}"):
        TensorParallel(rank, size)


@pytest.mark.spec("LOD-2")
@pytest.mark.parametrize(
    ("layer", "shard_id"),
    [
        (ReplicatedLinear(8, 4, TensorParallel()), None),
        (ColumnParallelLinear(8, 4, TensorParallel(1, 2)), None),
        (RowParallelLinear(8, 4, TensorParallel(1, 2)), None),
        (MergedColumnParallelLinear(8, [4, 4], TensorParallel(1, 2)), 1),
        (QKVParallelLinear(8, 2, 2, 1, TensorParallel(1, 2)), "q"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LinearBase) else "",
)
def test_a_mis_shaped_tensor_is_refused_with_both_shapes(layer, shard_id):
    for shape in [(5, 8), (4, 9), (8, 4), (4,)]:
        with pytest.raises(ValueError) as refused:
            layer.weight.weight_loader(layer.weight, torch.zeros(shape), shard_id)
        assert str(shape) in str(refused.value)
        assert "(4, 8)" in str(refused.value)


@pytest.mark.spec("LOD-2")
def test_loading_casts_to_the_parameters_dtype(randn):
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = ColumnParallelLinear(8, 4, TensorParallel())
    finally:
        torch.set_default_dtype(torch.float32)
    weight = randn(4, 8)
    layer.weight.weight_loader(layer.weight, weight)
    assert torch.equal(layer.weight, weight.bfloat16())
