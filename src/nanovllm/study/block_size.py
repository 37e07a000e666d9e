"""Block size: what is wasted, how long tables get, what of a prefix is found, what it costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.conformance.protocol import World
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.study.findings import Findings, Table, checked
from nanovllm.study.lab import Run, run
from nanovllm.study.workloads import Talk, chats, documents

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Measured:
    """One block size on one workload.

    Attributes:
        waste: share of the held slots that no token has come to.
        empty: such slots per running request.
        entries: mean length of a running request's table.
        hit_share: of prompt tokens.
        running: mean number of running requests.
        num_steps: until all had ended.
        metadata: bytes on the host per token in the cache; see `metadata_bytes`.
        door_us: CPU time of scheduler and block manager, microseconds per computed token.
    """

    block_size: int
    waste: float
    empty: float
    entries: float
    hit_share: float
    running: float
    num_steps: int
    metadata: float
    door_us: float
    num_checks: int


def measure(block_size: int, talks: Sequence[Talk], num_slots: int, num_seqs: int = 32) -> Measured:
    """`num_slots` is the memory, the same for every block size."""
    world = World(
        block_size,
        num_slots // block_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=num_slots,
    )
    return summary(block_size, run(world, talks))


def summary(block_size: int, result: Run) -> Measured:
    steps = result.steps
    running = sum(step.num_running for step in steps)
    return Measured(
        block_size=block_size,
        waste=sum(s.empty_slots for s in steps) / sum(s.held_slots for s in steps),
        empty=sum(s.empty_slots for s in steps) / running,
        entries=sum(s.table_entries for s in steps) / running,
        hit_share=result.hit_share,
        running=running / len(steps),
        num_steps=len(steps),
        metadata=metadata_bytes(block_size),
        door_us=1e6 * result.door_seconds / result.num_computed,
        num_checks=result.evaluations.total(),
    )


def metadata_bytes(block_size: int, num_tokens: int = 4096) -> float:
    """What blocks, table, hashes and map of one request take on the host, per token.

    All of it published; the tokens themselves, which the request holds anyway, not counted.
    """
    tokens = list(range(num_tokens))
    params = SamplingParams()
    seq = EngineSequence(0, tokens, params, block_size=block_size, max_tokens=1)
    tracemalloc.start()
    manager = BlockManager(num_tokens // block_size, block_size)
    manager.allocate(seq, [], num_tokens)
    manager.publish(seq, 0, num_tokens)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / num_tokens


def study() -> Findings:
    workloads = {
        "Chats of three turns behind a system prompt": (chats(40), 6144),
        "Documents with three questions each": (documents(6), 8192),
    }
    found = {
        name: [measure(size, talks, slots) for size in SIZES]
        for name, (talks, slots) in workloads.items()
    }
    return Findings(
        tables=tuple(
            table(f"{name}, {workloads[name][1]:,} slots", lines) for name, lines in found.items()
        ),
        remarks=(checked([line.num_checks for lines in found.values() for line in lines]),),
        draw=lambda figure: draw(figure, found),
    )


def table(name: str, lines: Sequence[Measured]) -> Table:
    columns = (
        "block size",
        "slots wasted",
        "of a request",
        "table entries",
        "prompt found",
        "running",
        "steps",
        "bytes/token",
        "CPU us/token",
    )
    cells = [
        (
            str(line.block_size),
            f"{line.waste:.1%}",
            f"{line.empty:.1f}",
            f"{line.entries:.1f}",
            f"{line.hit_share:.1%}",
            f"{line.running:.1f}",
            str(line.num_steps),
            f"{line.metadata:.0f}",
            f"{line.door_us:.1f}",
        )
        for line in lines
    ]
    return Table(name, columns, cells)


def draw(figure: Any, found: dict[str, list[Measured]]) -> None:
    panels: tuple[tuple[str, Callable[[Measured], float]], ...] = (
        ("held slots without a token, %", lambda m: 100 * m.waste),
        ("table entries of a request", lambda m: m.entries),
        ("prompt tokens found, %", lambda m: 100 * m.hit_share),
    )
    for axes, (title, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for (name, lines), marker in zip(found.items(), "os", strict=True):
            sizes = [line.block_size for line in lines]
            label = name.split()[0].lower()
            axes.plot(sizes, [value(line) for line in lines], marker=marker, label=label)
        axes.set(xscale="log", title=title, xlabel="block size, tokens")
        axes.set_xticks(SIZES, map(str, SIZES), minor=False)
        axes.minorticks_off()
        axes.legend()
    figure.axes[1].set_yscale("log")
