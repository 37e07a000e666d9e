"""Prefix index: a hash chain against a radix tree, and what a weak hash does to the chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import process_time
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.study.collisions import Collisions, collide
from nanovllm.study.findings import Findings, Table, checked
from nanovllm.study.indexes import INDEXES, MakeManager, run_index
from nanovllm.study.lab import Run, without_collections
from nanovllm.study.radix_tree import RadixBlockManager
from nanovllm.study.workloads import assembled, chats

BLOCK_SIZES = (1, 4, 16, 64, 256)
BITS = (0, 4, 8, 12, 16, 128)
NUM_SLOTS = 4096


def num_entries(manager: BlockManager) -> int:
    """Entries of a chain's map, or nodes of a tree."""
    if isinstance(manager, RadixBlockManager):
        return manager.tree.num_nodes
    return len(manager.hash_to_block_ids)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time in nanoseconds per prompt token.

    Attributes:
        store: look up a prompt that is not there, take blocks, publish them.
        find: look up one that is there whole.
        find_again: the same request once more, as while it waits for room.
    """

    store: float
    find: float
    find_again: float


def cost(make: MakeManager, block_size: int, num_prompts: int = 24, length: int = 1024) -> Cost:
    """The least of five repeats: whatever else the machine does only adds to it."""
    with without_collections():
        repeats = [_cost_once(make, block_size, num_prompts, length) for _ in range(5)]
    return Cost(
        *(
            min(getattr(repeat, name) for repeat in repeats)
            for name in ("store", "find", "find_again")
        )
    )


def _cost_once(make: MakeManager, block_size: int, num_prompts: int, length: int) -> Cost:
    manager = make(num_prompts * length // block_size + num_prompts, block_size)

    def sequences() -> list[EngineSequence]:
        return [
            EngineSequence(
                i,
                list(range(i * length, (i + 1) * length + 1)),
                SamplingParams(),
                block_size=block_size,
                max_tokens=1,
            )
            for i in range(num_prompts)
        ]

    stored, asked = sequences(), sequences()
    times = [process_time()]
    for seq in stored:
        manager.allocate(seq, manager.lookup(seq), length)
        manager.publish(seq, 0, length)
    times.append(process_time())
    for _ in range(2):
        hits = [manager.lookup(seq) for seq in asked]
        times.append(process_time())
        assert all(len(found) * block_size == length for found in hits)
    num_tokens = num_prompts * length
    return Cost(*(1e9 * (b - a) / num_tokens for a, b in pairwise(times)))


# ---- the study -----------------------------------------------------------------------------------


def study() -> Findings:
    hits, checks = [], []
    for block_size in (16, 1):
        for name, make in INDEXES.items():
            result, manager = run_index(make, chats(32), block_size, NUM_SLOTS)
            hits.append(hit_line(f"{name}, blocks of {block_size}", result, manager))
            checks.append(result.evaluations.total())
    costs = {name: [cost(make, size) for size in BLOCK_SIZES] for name, make in INDEXES.items()}
    collisions = [collide(bits, assembled(300), 8192) for bits in BITS]
    checks += [line.num_checks for line in collisions]
    return Findings(
        tables=(
            Table("Chats of three turns", ("", "prompt found", "computed", "index entries"), hits),
            cost_table(costs),
            collision_table(collisions),
        ),
        remarks=(checked(checks),),
        draw=lambda figure: draw(figure, costs, collisions),
    )


def hit_line(name: str, result: Run, manager: BlockManager) -> tuple[str, ...]:
    return (
        name,
        f"{result.hit_share:.1%}",
        f"{result.num_computed:,}",
        f"{num_entries(manager):,}",
    )


def cost_table(costs: dict[str, list[Cost]]) -> Table:
    lines = [
        (f"{name}, blocks of {size}", f"{c.store:.0f}", f"{c.find:.0f}", f"{c.find_again:.0f}")
        for name, found in costs.items()
        for size, c in zip(BLOCK_SIZES, found, strict=True)
    ]
    title = "CPU nanoseconds per token of prompts of 1,024 tokens"
    return Table(title, ("", "store", "find", "find again"), lines)


def collision_table(collisions: Sequence[Collisions]) -> Table:
    columns = (
        "bits of the hash",
        "prompt found",
        "found under a hash",
        "compared",
        "wrong one first",
        "own tokens equal",
        "an engine that trusts it",
    )
    lines = [
        (
            str(line.bits),
            f"{line.hit_share:.1%}",
            f"{line.num_found:,}",
            f"{line.num_compared:,}",
            f"{line.num_wrong:,}",
            f"{line.num_same_tokens:,}",
            line.trust,
        )
        for line in collisions
    ]
    return Table("300 prompts of equal paragraphs in any order, hash chain", columns, lines)


def draw(figure: Any, costs: dict[str, list[Cost]], collisions: Sequence[Collisions]) -> None:
    left, right = figure.subplots(1, 2)
    for (name, found), colour in zip(costs.items(), ("C0", "C1"), strict=True):
        for what, style in (("find", "-"), ("store", "--")):
            values = [getattr(c, what) for c in found]
            left.plot(BLOCK_SIZES, values, style, marker="o", color=colour, label=f"{name}, {what}")
    left.set(
        xscale="log", yscale="log", xlabel="block size, tokens", title="CPU ns per prompt token"
    )
    left.set_xticks(BLOCK_SIZES, map(str, BLOCK_SIZES))
    left.minorticks_off()
    left.legend()
    names = [str(line.bits) for line in collisions]
    right.bar(names, [c.num_found for c in collisions], color="C7", label="found under a hash")
    right.bar(names, [c.num_wrong for c in collisions], color="C3", label="of another history")
    right.set(xlabel="bits of the hash", title="lookups of the chain that found somebody")
    right.legend()
