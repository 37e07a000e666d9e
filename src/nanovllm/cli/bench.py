"""`nanovllm bench`: profiles of this engine, some of them of peers beside it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nanovllm.cli.options import EngineOptions, panel, with_options
from nanovllm.cli.terminal import stderr, usage_errors

if TYPE_CHECKING:
    from nanovllm.bench.runner import Plan

_work = panel("Work")
_peer = panel("Peers")
_output = panel("Output")


@dataclass(frozen=True)
class WorkOptions:
    """The requests."""

    seeds: Annotated[
        list[int] | None, _work("Of the workload; may be given several times.", "--seed")
    ] = None
    num_requests: Annotated[int, _work("Requests of throughput and online.")] = 256
    max_len: Annotated[int, _work("Longest prompt and longest output of these.")] = 1024
    batch_sizes: Annotated[
        list[int] | None, _work("Of latency and kernels; may be given several times.", "--batch")
    ] = None
    prompt_len: Annotated[
        int | None, _work("Prompts of latency and kernels. None: 512, if --max-len allows.")
    ] = None
    latency_steps: Annotated[int, _work("Steps of latency that are timed.")] = 128
    rates: Annotated[
        list[float] | None,
        _work(
            "Requests a second of online; may be given several times. None: 80 % of what the "
            "engine can do.",
            "--rate",
        ),
    ] = None


@dataclass(frozen=True)
class PeerOptions:
    """Engines to compare with."""

    names: Annotated[
        list[str] | None,
        _peer("nano-vllm, vllm or hf; runs throughput and latency in its own process.", "--peer"),
    ] = None
    python: Annotated[
        str, _peer("Interpreter of the environment that it is in.", "--peer-python")
    ] = sys.executable
    path: Annotated[
        Path | None, _peer("Directory to import it from.", "--peer-path", file_okay=False)
    ] = None


@dataclass(frozen=True)
class OutputOptions:
    """Files beside the tables."""

    json_file: Annotated[
        Path | None, _output("Figures and machine, as JSON.", "--json", dir_okay=False)
    ] = None
    plot: Annotated[
        Path | None, _output("Runs over time: FILE.png or FILE.html.", dir_okay=False)
    ] = None


@with_options
def bench(
    profiles: Annotated[
        list[str] | None,
        typer.Argument(help="Some of throughput (default), latency, online, kernels, prefill."),
    ] = None,
    *,
    work: WorkOptions,
    peer: PeerOptions,
    output: OutputOptions,
    engine: EngineOptions,
) -> None:
    """Measure the engine, and other engines beside it.

    The workload of throughput and online is nano-vllm's; a model of made-up
    weights and a real shape serves as well as the real one:

      nanovllm bench --model synthetic:qwen3-0.6b
      nanovllm bench throughput latency online --model DIR --json out.json --plot out.html
      nanovllm bench --model DIR --peer vllm --peer-python ~/vllm/bin/python
      nanovllm bench --num-requests 8 --max-len 32      (the embedded model)

    Throughput: output tokens a second, all requests there at once; the seconds
    that the device waited for the host; the share of this device's own
    roofline. Latency: ms a decode step. Online:
    Poisson arrivals under both policies, time to first token (ttft) and per
    later token (tpot). Kernels: what one decode step runs on the device.
    Prefill: the same of 16 x 1,024 tokens, and its share of the matmul rate.
    """
    console = stderr()
    with usage_errors(), console.status("importing") as status:
        from nanovllm.bench.plot import write_plots
        from nanovllm.bench.runner import run_bench

        plan = _plan(profiles, work, peer)
        _check_output(output, plan)
        report = run_bench(asdict(engine), plan, say=status.update)
    report.print(Console())
    with usage_errors():
        if output.json_file:
            output.json_file.write_text(json.dumps(report.as_json(), indent=1))
        if output.plot:
            write_plots(output.plot, report.records(), report.machine)


def _check_output(output: OutputOptions, plan: Plan) -> None:
    """ValueError for what could not be written: better before a measurement than after it."""
    from nanovllm.bench.plot import check_plot_path

    for path in (output.json_file, output.plot):
        if path and not path.resolve().parent.is_dir():
            raise ValueError(f"there is no directory {str(path.parent)!r} for {path.name!r}")
    if output.plot:
        check_plot_path(output.plot)
        if not {"throughput", "online"} & set(plan.profiles):
            raise ValueError("--plot draws throughput and online, neither of which is asked for")


def _plan(profiles: list[str] | None, work: WorkOptions, peer: PeerOptions) -> Plan:
    """Options that were not given keep the plan's defaults."""
    from nanovllm.bench.peers import Peer
    from nanovllm.bench.runner import Plan

    given = {"profiles": profiles} | asdict(work)
    peers = tuple(Peer(name, peer.python, peer.path) for name in peer.names or ())
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value not in (None, [])
    }
    return Plan(**values, peers=peers)
