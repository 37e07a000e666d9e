"""The figures of one `nanovllm bench`: as tables for people, as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanovllm.bench.kernels import Kernel, KernelRun
from nanovllm.bench.peers import PeerRun
from nanovllm.bench.prefill import PrefillRun
from nanovllm.bench.profiles import LatencyRun, OnlineRun, ThroughputRun
from nanovllm.bench.recorder import StepRecord
from nanovllm.bench.roofline import DeviceRates

OURS = "nanovllm"


@dataclass
class Report:
    """Runs in the order in which they were made."""

    machine: dict[str, str | None]
    options: dict[str, Any]
    rates: DeviceRates | None = None
    throughput: list[ThroughputRun] = field(default_factory=list)
    latency: list[LatencyRun] = field(default_factory=list)
    online: list[OnlineRun] = field(default_factory=list)
    kernels: list[KernelRun] = field(default_factory=list)
    prefill: PrefillRun | None = None
    peers: list[PeerRun] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything but the records of the steps."""
        return {
            "machine": self.machine,
            "options": self.options,
            "rates": asdict(self.rates) if self.rates else None,
            "throughput": [
                _without_records(run)
                | {
                    "tokens_per_second": run.tokens_per_second,
                    "exposed_seconds": run.exposed_seconds,
                    "roofline_share": run.roofline_share,
                }
                for run in self.throughput
            ],
            "latency": [
                asdict(run) | {"median_ms": run.median_ms, "roofline_share": run.roofline_share}
                for run in self.latency
            ],
            "online": [_without_records(run) | run.milliseconds() for run in self.online],
            "kernels": [asdict(run) for run in self.kernels],
            "prefill": self.prefill and asdict(self.prefill) | self._matmul_shares(self.prefill),
            "peers": [asdict(run) for run in self.peers],
        }

    def records(self) -> list[tuple[str, list[StepRecord]]]:
        """Title and steps of each run that kept them; titles of equal runs are equal."""
        offline = [(f"throughput, seed {run.seed}", run.records) for run in self.throughput]
        online = [
            (f"online, {run.policy}, seed {run.seed}, {run.rate:g} / s", run.records)
            for run in self.online
        ]
        return offline + online

    def print(self, console: Console) -> None:
        """One table per profile that ran."""
        console.print(", ".join(f"{k} {v}" for k, v in self.machine.items() if v), style="dim")
        for runs, table in (
            (self.throughput, self._throughput_table),
            (self.latency, self._latency_table),
            (self.online, self._online_table),
        ):
            if runs:
                console.print(table())
        for run in self.kernels:
            title = f"A decode step of {run.batch_size} x {run.context_len} tokens"
            console.print(_kernel_table(title, run.kernels))
        if self.prefill:
            console.print(self._prefill_table(self.prefill))
        if self.rates:
            console.print(
                f"roofline from {self.rates.copy / 1e12:.3g} TB/s copied and "
                f"{self.rates.matmul / 1e12:.3g} TFLOP/s multiplied, measured in this run"
            )

    def _throughput_table(self) -> Table:
        heads = "engine", "seed", "s", "host s", "output tok/s", "roofline", "preempted"
        table = _table("Throughput", *heads)
        for run in self.throughput:
            share = "" if run.roofline_share is None else f"{run.roofline_share:.0%}"
            table.add_row(
                OURS,
                str(run.seed),
                f"{run.seconds:.2f}",
                f"{run.exposed_seconds:.2f}",
                f"{run.tokens_per_second:,.0f}",
                share,
                str(run.num_preemptions),
            )
        for peer in self.peers:
            for seed, (seconds, rate) in peer.throughput.items():
                table.add_row(peer.title, str(seed), f"{seconds:.2f}", "", f"{rate:,.0f}", "", "")
        return table

    def _latency_table(self) -> Table:
        """A row per engine, a column per batch size."""
        sizes = [run.batch_size for run in self.latency]
        table = _table("Latency, ms a step", "engine", *(f"batch {size}" for size in sizes))
        _add_latencies(table, OURS, [run.median_ms for run in self.latency])
        for peer in self.peers:
            if peer.latency_ms:
                _add_latencies(table, peer.title, [peer.latency_ms[size] for size in sizes])
        return table

    def _online_table(self) -> Table:
        names = list(dict.fromkeys(name for run in self.online for name in run.milliseconds()))
        heads = [name.replace("_", " ") for name in names]
        table = _table("Online, ms", "policy", "seed", "req/s", "tok/s", *heads)
        table.columns[0].no_wrap = True
        for run in self.online:
            figures = run.milliseconds()
            table.add_row(
                run.policy,
                str(run.seed),
                f"{run.rate:.3g}",
                f"{run.num_output_tokens / run.seconds:,.0f}",
                *(f"{figures[name]:.1f}" if name in figures else "" for name in names),
            )
        return table

    def _matmul_shares(self, run: PrefillRun) -> dict[str, float]:
        assert self.rates is not None, "measured for every prefill"
        return {
            "matmul_share": run.matmul_share(self.rates),
            "matmul_share_without_attention": run.matmul_share(self.rates, attention=False),
        }

    def _prefill_table(self, run: PrefillRun) -> Table:
        whole, weights = self._matmul_shares(run).values()
        title = (
            f"A prefill of {run.num_prompts} x {run.prompt_len} tokens: {whole:.0%} of the rate of "
            f"a product, {weights:.0%} without attention's own"
        )
        return _kernel_table(title, run.kernels)


def _kernel_table(title: str, kernels: list[Kernel]) -> Table:
    us = sum(kernel.us for kernel in kernels)
    table = _table(f"{title}: {us:,.0f} us", "kernel", "calls", "us")
    for kernel in kernels:
        name = kernel.name if len(kernel.name) <= 60 else kernel.name[:57] + "..."
        table.add_row(escape(name), f"{kernel.count:g}", f"{kernel.us:,.1f}")
    return table


def _add_latencies(table: Table, engine: str, values: Iterable[float]) -> None:
    table.add_row(engine, *(f"{value:.3f}" for value in values))


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _without_records(run: ThroughputRun | OnlineRun) -> dict[str, Any]:
    values = asdict(run)
    del values["records"]
    return values
