"""The two ends of a language model, split by vocabulary: token embedding and output head.

A rank holds `ceil(vocab_size / size)` rows. An odd vocabulary is padded at its end by rows of zeros
that no id reaches and whose logits are cut off (TP-3a).
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.ops import TORCH_OPS, Ops
from nanovllm.layers.parallel import TensorParallel
from nanovllm.layers.weight import ShardId, check_shape, new_weight


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rank r holds rows `[r * rows, (r + 1) * rows)`."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // tp.size)
        self.first_id = tp.rank * self.rows
        self.weight = new_weight(self.rows, hidden_size, loader=self.weight_loader)

    def weight_loader(
        self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        check_shape(loaded, (self.vocab_size, param.size(1)))
        own = loaded[self.first_id : self.first_id + self.rows]
        param[: len(own)].copy_(own)
        param[len(own) :].zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids: [T] int64 -> [T, hidden_size]`, equal on every rank."""
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first_id
        elsewhere = (local < 0) | (local >= self.rows)
        y = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(y.masked_fill(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(VocabParallelEmbedding):
    """The embedding's transpose: logits of every id, each rank computing its own rows."""

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, ops: Ops = TORCH_OPS
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.ops = ops

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden: [R, hidden_size] -> [R, vocab_size]` logits, equal on every rank."""
        logits = self.tp.all_gather(self.ops.linear(hidden, self.weight, None))
        return logits[:, : self.vocab_size]
