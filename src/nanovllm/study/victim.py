"""Victim choice: who gives way when blocks are short, and what that costs whom."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Any

from nanovllm.conformance.protocol import World
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepBuilder
from nanovllm.study.findings import Findings, Table, checked
from nanovllm.study.lab import Run, run
from nanovllm.study.workloads import Talk, uneven

BLOCK_SIZE = 8
SEEDS = range(4)


class ByRank(Scheduler):
    """The running request of the highest rank gives way, and is served last.

    So nobody gives way who has a row in the plan already.
    """

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        raise NotImplementedError

    def _serve(self, seqs: Seq[Sequence], plan: StepBuilder) -> None:
        super()._serve(sorted(seqs, key=self.rank), plan)

    def _victim(self, seq: Sequence, plan: StepBuilder) -> Sequence:
        return max(self.running, key=self.rank)


class Longest(ByRank):
    """The one with the most tokens, but never the oldest."""

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        return (seq is not self.running[0], seq.num_tokens, seq.seq_id)


class Oldest(ByRank):
    """The one that arrived first: SCH-8 forbids it, and this study shows why."""

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        return (-seq.seq_id,)


POLICIES: dict[str, tuple[type[Scheduler], tuple[str, ...]]] = {
    "newest": (Scheduler, ()),
    "longest": (Longest, ()),
    "oldest": (Oldest, ("SCH-8",)),
}
"""The scheduler, and what it breaks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy, over several workloads.

    Attributes:
        recomputed: share of the computed tokens that had been computed before.
        overtaken: share of all pairs of requests of which the later one ended first.
        mean_stall, p95_stall, worst_stall: steps between a request's first row and its end in
            which it made no new token.
    """

    policy: str
    num_preemptions: float
    most_preemptions: int
    recomputed: float
    overtaken: float
    mean_stall: float
    p95_stall: float
    worst_stall: int
    num_steps: float
    num_checks: int


def run_policy(policy: str, talks: Seq[Talk], num_blocks: int, *, cache: bool = True) -> Run:
    scheduler_class, unchecked = POLICIES[policy]
    world = World(
        BLOCK_SIZE,
        num_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=512,
        prefix_cache=cache,
    )
    return run(world, talks, scheduler_class, unchecked)


def measure(policy: str, runs: Seq[Run]) -> Measured:
    stalls = [stall for r in runs for stall in stalls_of(r)]
    return Measured(
        policy=policy,
        num_preemptions=mean(r.num_preemptions for r in runs),
        most_preemptions=max(entry.num_preemptions for r in runs for entry in r.entries),
        recomputed=sum(r.num_recomputed for r in runs) / sum(r.num_computed for r in runs),
        overtaken=mean(overtaken(r) for r in runs),
        mean_stall=mean(stalls),
        p95_stall=quantiles(stalls, n=20)[-1],
        worst_stall=max(stalls),
        num_steps=mean(len(r.steps) for r in runs),
        num_checks=sum(r.evaluations.total() for r in runs),
    )


def stalls_of(result: Run) -> list[int]:
    return [
        result.ended[e.id.request] - result.started[e.id.request] - len(e.completion)
        for e in result.entries
    ]


def overtaken(result: Run) -> float:
    ends = [result.ended[request] for request in sorted(result.ended)]
    pairs = [(a, b) for i, a in enumerate(ends) for b in ends[i + 1 :]]
    return sum(a > b for a, b in pairs) / len(pairs)


def study() -> Findings:
    tables, checks, shown = [], [], {}
    for cache in (False, True):
        lines = []
        for policy in POLICIES:
            runs = [run_policy(policy, uneven(60, seed=s), 72, cache=cache) for s in SEEDS]
            lines.append(measure(policy, runs))
            shown[policy] = runs[0]
        title = f"60 requests, 72 blocks of {BLOCK_SIZE}, prefix cache {'on' if cache else 'off'}"
        tables.append(table(title, lines))
        checks += [line.num_checks for line in lines]
    return Findings(tuple(tables), (checked(checks),), lambda figure: draw(figure, shown))


def table(title: str, lines: Seq[Measured]) -> Table:
    columns = (
        "victim",
        "preemptions",
        "of one request",
        "recomputed",
        "overtaken",
        "mean stall",
        "95th",
        "worst",
        "all done",
    )
    cells = [
        (
            line.policy,
            f"{line.num_preemptions:.0f}",
            f"<= {line.most_preemptions}",
            f"{line.recomputed:.1%}",
            f"{line.overtaken:.1%}",
            f"{line.mean_stall:.0f}",
            f"{line.p95_stall:.0f}",
            str(line.worst_stall),
            f"{line.num_steps:.0f}",
        )
        for line in lines
    ]
    return Table(title, columns, cells)


def draw(figure: Any, shown: dict[str, Run]) -> None:
    panels = figure.subplots(1, len(shown), sharey=True)
    for axes, (policy, result) in zip(panels, shown.items(), strict=True):
        requests = sorted(result.ended)
        counts = [entry.num_preemptions for entry in result.entries]
        axes.vlines(
            requests,
            [result.started[i] for i in requests],
            [result.ended[i] for i in requests],
            colors=["C3" if count else "C0" for count in counts],
        )
        axes.set(title=f"the {policy} gives way", xlabel="request, by arrival")
    figure.axes[0].set_ylabel("step: first row to end\n(red: was preempted)")
