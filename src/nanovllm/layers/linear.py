"""The linear layers of tensor parallelism (Megatron-LM, Shoeybi et al. 2019).

A column-parallel layer splits its outputs, so it needs no communication; a row-parallel one splits
its inputs, so it sums over the ranks. A column layer feeding a row layer costs one all-reduce:

    x: [T, in] --column--> [T, mid / size] --elementwise--> --row--> partial [T, out] --sum--> y

All sizes given to a constructor are those of the whole layer, and every checkpoint tensor is the
whole one: a layer cuts its own part, `weight: [out, in]` as in `torch.nn.Linear`.
"""

import torch
from torch import nn

from nanovllm.layers.ops import TORCH_OPS, Ops
from nanovllm.layers.parallel import TensorParallel
from nanovllm.layers.weight import ShardId, load_shard, load_whole, new_weight


class LinearBase(nn.Module):
    """`y = x @ weight.T + bias` with this rank's part of the weights.

    `input_size` and `output_size` are this rank's; subclasses say which part that is by
    `weight_loader`, whose contract is `nanovllm.layers.weight.WeightLoader`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TensorParallel,
        bias: bool = False,
        ops: Ops = TORCH_OPS,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.ops = ops
        self.weight = new_weight(output_size, input_size, loader=self.weight_loader)
        self.bias = new_weight(output_size, loader=self.bias_loader) if bias else None

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        raise NotImplementedError

    def bias_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        """A bias is split like the output dimension of the weight, its dimension 0."""
        self.weight_loader(param, loaded, shard_id)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x: [T, input_size] -> [T, output_size]`, both this rank's sizes."""
        return self.ops.linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole layer."""

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        load_whole(param, loaded)


class ColumnParallelLinear(LinearBase):
    """Rank r computes the r-th of `size` equal slices of the outputs."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TensorParallel,
        bias: bool = False,
        ops: Ops = TORCH_OPS,
    ) -> None:
        super().__init__(input_size, tp.divide(output_size, "output_size"), tp, bias, ops)

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        load_shard(param, loaded, 0, self.tp.rank, self.tp.size)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers of one input as a single matrix product.

    A rank's output is its slice of the first layer, then of the second, ...; `shard_id` is the
    layer's index in `output_sizes`.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        tp: TensorParallel,
        bias: bool = False,
        ops: Ops = TORCH_OPS,
    ) -> None:
        self.part_sizes = [tp.divide(size, "output_size") for size in output_sizes]
        super().__init__(input_size, sum(self.part_sizes), tp, bias, ops)

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        assert isinstance(shard_id, int), f"a merged layer loads by part, not {shard_id!r}"
        part = torch.split(param, self.part_sizes)[shard_id]
        load_shard(part, loaded, 0, self.tp.rank, self.tp.size)


class QKVParallelLinear(LinearBase):
    """The query, key and value projections as one column-parallel layer, split by heads.

    A rank's output is `[T, (num_heads + 2 * num_kv_heads) * head_dim]`: its query heads, then its
    key heads, then its value heads. Fewer KV heads than ranks are replicated (TP-3b); rank r then
    holds the head that its query heads attend to. `shard_id` is "q", "k" or "v".
    Raises ValueError when the heads cannot be split (TP-3c).
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        tp: TensorParallel,
        bias: bool = False,
        ops: Ops = TORCH_OPS,
    ) -> None:
        self.num_heads = tp.divide(total_num_heads, "num_attention_heads")
        self.num_kv_heads, self.kv_replicas = tp.divide_or_replicate(
            total_num_kv_heads, "num_key_value_heads"
        )
        self.part_heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        self.part_sizes = [heads * head_dim for heads in self.part_heads]
        super().__init__(hidden_size, sum(self.part_sizes), tp, bias, ops)

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        assert shard_id in ("q", "k", "v"), f"a QKV layer loads q, k or v, not {shard_id!r}"
        part = torch.split(param, self.part_sizes)["qkv".index(shard_id)]
        replicas = 1 if shard_id == "q" else self.kv_replicas
        load_shard(part, loaded, 0, self.tp.rank // replicas, self.tp.size // replicas)


class RowParallelLinear(LinearBase):
    """Rank r consumes the r-th of `size` equal slices of the inputs; the outputs are summed.

    Not if `reduce_results` is False: then whoever uses the output has to (`RMSNorm` can).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: TensorParallel,
        bias: bool = False,
        ops: Ops = TORCH_OPS,
        reduce_results: bool = True,
    ) -> None:
        super().__init__(tp.divide(input_size, "input_size"), output_size, tp, bias, ops)
        self.reduce_results = reduce_results

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        load_shard(param, loaded, 1, self.tp.rank, self.tp.size)

    def bias_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        load_whole(param, loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x: [T, input_size / size] -> [T, output_size]`, equal on every rank if summed."""
        # One rank adds the bias, or the sum would count it `size` times (TP-6).
        bias = self.bias if self.tp.rank == 0 else None
        y = self.ops.linear(x, self.weight, bias)
        return self.tp.all_reduce(y) if self.reduce_results else y
