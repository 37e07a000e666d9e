"""Graphs: which shapes steps have, which come again, and what padding to a few of them wastes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nanovllm.conformance.protocol import World
from nanovllm.study.findings import Findings, Table, checked
from nanovllm.study.lab import Run, Step, run
from nanovllm.study.launches import launches_by_tokens
from nanovllm.study.workloads import chats

MAX_SEQS = 64
BUDGET = 2048
BATCH_SIZES = (1, 2, 4, 8, *range(16, MAX_SEQS + 1, 16))
"""The tutorial's list of captured batch sizes."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Steps of one kind.

    Attributes:
        shapes: of each step, (rows, tokens).
        num_layouts: distinct lists of tokens per row, which is what attention is given.
        seen_before: share of the steps whose shape an earlier step had.
        num_graphs: buckets of (rows, tokens) that are used.
        padding: tokens by which the bucket exceeds a step, on average.
        padded_share: of all tokens in buckets, the ones that are padding.
    """

    kind: str
    shapes: tuple[tuple[int, int], ...]
    num_layouts: int
    seen_before: float
    num_graphs: int
    padding: float
    padded_share: float

    @property
    def median_tokens(self) -> float:
        return median(tokens for _, tokens in self.shapes)


def is_decode(step: Step) -> bool:
    return all(row.count == 1 for row in step.rows)


def decode_bucket(step: Step) -> tuple[int, int]:
    """The smallest captured batch size that is enough."""
    size = next(size for size in BATCH_SIZES if size >= len(step.rows))
    return size, size


def prefill_bucket(step: Step) -> tuple[int, int]:
    """Rows and tokens up to the next power of two each, so that there are few graphs."""
    return power_of_two(len(step.rows)), power_of_two(step.num_tokens)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def shapes_of(kind: str, steps: Sequence[Step]) -> Shapes:
    bucket = decode_bucket if kind == "decode" else prefill_bucket
    buckets = [bucket(step) for step in steps]
    shapes = tuple((len(step.rows), step.num_tokens) for step in steps)
    padded, used = (sum(tokens for _, tokens in pairs) for pairs in (buckets, shapes))
    return Shapes(
        kind=kind,
        shapes=shapes,
        num_layouts=len({tuple(sorted(row.count for row in step.rows)) for step in steps}),
        seen_before=1 - len(set(shapes)) / len(shapes),
        num_graphs=len(set(buckets)),
        padding=(padded - used) / len(steps),
        padded_share=1 - used / padded,
    )


def measure(num_talks: int, every: int) -> tuple[Run, list[Shapes]]:
    """Decodes and prefills of chats that begin `every` so many steps."""
    world = World(16, 1024, MAX_SEQS, BUDGET, max_model_len=4096)
    result = run(world, chats(num_talks, every=every))
    steps = [step for step in result.steps if step.rows]
    decodes = [step for step in steps if is_decode(step)]
    prefills = [step for step in steps if not is_decode(step)]
    return result, [shapes_of("decode", decodes), shapes_of("prefill", prefills)]


def study() -> Findings:
    busy, crowded = measure(120, every=1)
    calm, few = measure(120, every=6)
    title = "120 chats of three turns, 64 seats, one begins every"
    return Findings(
        tables=(
            table(f"{title} step", crowded),
            table(f"{title} 6 steps", few),
            launch_table(launches_by_tokens()),
        ),
        remarks=(checked([busy.evaluations.total(), calm.evaluations.total()]),),
        draw=lambda figure: draw(figure, few),
    )


def table(title: str, found: Sequence[Shapes]) -> Table:
    columns = ("", *(f"{shapes.kind} steps" for shapes in found))
    lines = [
        ("steps", *(f"{len(s.shapes):,}" for s in found)),
        ("tokens in a step, median", *(f"{s.median_tokens:g}" for s in found)),
        ("distinct (rows, tokens)", *(str(len(set(s.shapes))) for s in found)),
        ("distinct tokens per row", *(str(s.num_layouts) for s in found)),
        ("steps of a shape seen before", *(f"{s.seen_before:.1%}" for s in found)),
        ("graphs, if padded to buckets", *(str(s.num_graphs) for s in found)),
        ("padding then, tokens a step", *(f"{s.padding:.1f}" for s in found)),
        ("padding then, of all tokens", *(f"{s.padded_share:.1%}" for s in found)),
    ]
    return Table(title, columns, lines)


def launch_table(launches: dict[int, int]) -> Table:
    lines = [
        (f"{n} (a decode)" if n == 1 else str(n), str(count), f"{count / n:.2f}")
        for n, count in sorted(launches.items())
    ]
    columns = ("tokens of the one row", "operations launched", "per token")
    return Table("A step of the embedded model, torch backend", columns, lines)


def draw(figure: Any, found: Sequence[Shapes]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for shapes, marker in zip(found, "ox", strict=True):
        left.scatter(*zip(*set(shapes.shapes), strict=True), s=14, marker=marker, label=shapes.kind)
    left.set(yscale="log", xlabel="rows of a step", ylabel="tokens of a step", title="shapes")
    left.legend()
    for shapes in found:
        seen: set[tuple[int, int]] = set()
        counts = [len(seen := seen | {shape}) for shape in shapes.shapes]
        right.plot(range(1, len(counts) + 1), counts, label=shapes.kind)
    right.set(xlabel="steps of this kind", title="distinct shapes so far")
    right.legend()
