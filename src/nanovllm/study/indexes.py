"""The two prefix indexes, and engines that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanovllm.config import SchedulerConfig
from nanovllm.conformance.protocol import World
from nanovllm.engine.block_manager import BlockManager, HashFunction
from nanovllm.engine.scheduler import Scheduler
from nanovllm.study.lab import Run, run
from nanovllm.study.radix_tree import RadixBlockManager
from nanovllm.study.workloads import Talk

MakeManager = Callable[[int, int], BlockManager]
INDEXES: dict[str, MakeManager] = {"hash chain": BlockManager, "radix tree": RadixBlockManager}


class Indexed(Scheduler):
    """The reference with another block manager."""

    def __init__(self, make: MakeManager, config: SchedulerConfig, _hash: HashFunction) -> None:
        super().__init__(config)
        self.block_manager = make(config.num_kvcache_blocks, config.kvcache_block_size)


def run_index(
    make: MakeManager, talks: Sequence[Talk], block_size: int, num_slots: int
) -> tuple[Run, BlockManager]:
    made: list[BlockManager] = []

    def scheduler(config: SchedulerConfig, hash_function: HashFunction) -> Scheduler:
        chosen = Indexed(make, config, hash_function)
        made.append(chosen.block_manager)
        return chosen

    world = World(
        block_size,
        num_slots // block_size,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=num_slots,
    )
    return run(world, talks, scheduler), made[-1]
