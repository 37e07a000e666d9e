"""What one rank of the tensor-parallel tests does, in its own process."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from dense_context import DenseContext

from nanovllm.engine.tensor_parallel.group import RankGroup
from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.loader import load_model


@dataclass(frozen=True)
class CountingParallel(TensorParallel):
    """Remembers the shape of everything it all-reduced."""

    reduced: list[tuple[int, ...]] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tuple(x.shape))
        return super().all_reduce(x)


def forward(path: Path, ids: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Logits after each of `ids: [T]`, as this rank sees them."""
    model = Qwen3ForCausalLM(ModelConfig.from_pretrained(path), tp)
    load_model(model, path)
    with torch.inference_mode():
        return model.compute_logits(model(ids, torch.arange(len(ids)), DenseContext()))


def run_rank(rank: int, size: int, rendezvous: Path, paths: list[Path], ids: torch.Tensor) -> None:
    """Runs every checkpoint in `paths`, and saves `{name: (logits, reduced shapes)}`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=size)
    results = {}
    for path in paths:
        tp = CountingParallel(rank, size, RankGroup(dist.group.WORLD))
        results[path.name] = (forward(path, ids, tp), tp.reduced)
    torch.save(results, rendezvous.with_suffix(f".{rank}"))
    dist.destroy_process_group()
