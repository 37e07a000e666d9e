"""Weak scaling of data parallelism: n engines with n times the requests against one engine.

    python scripts/bench_data_parallel.py --model path/to/Qwen3-0.6B --size 2

Both run nano-vllm's offline workload, n engines n times `--requests` of it; `--runs` times each,
with another seed each time. The figure is the ratio of the medians of output tokens per second. On
CUDA every engine has a GPU of its own; on a CPU it is for trying the script out. Where Ray cannot
be imported, or with `--processes`, the replicas are plain processes of this host.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from contextlib import ExitStack
from dataclasses import fields
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

from nanovllm import LLM
from nanovllm.bench.synthetic import model_directory
from nanovllm.bench.workload import MAX_LEN, NUM_REQUESTS, offline_workload
from nanovllm.config import Config
from nanovllm.data_parallel.dispatcher import Lost
from nanovllm.data_parallel.replica import Replica, ReplicaInfo, Task
from nanovllm.outputs import StepOutput

WARM_UP_SEED = 1_000_000


def serve(connection: Connection) -> None:
    """A replica in a process of its own: answers calls until the other end is gone."""
    replica = Replica()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(replica, method)(*arguments))


class ProcessPool:
    """A `Pool` of processes on this host, each with a GPU of its own; a failure ends the run."""

    def __init__(self, config: Config) -> None:
        context = multiprocessing.get_context("spawn")
        own = {"model", "data_parallel_size", "seed"}
        options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in own}
        size = config.data_parallel_size
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [*map(str, range(size))]
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, SpawnProcess] = {}
        self._working: set[int] = set()
        for replica in range(size):
            self._connections[replica], theirs = context.Pipe()
            self._processes[replica] = context.Process(target=serve, args=(theirs,), daemon=True)
            # What CUDA numbers is settled when a process first uses it.
            with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": devices[replica]}):
                self._processes[replica].start()
            theirs.close()
            self._connections[replica].send(("start", (config.model, options)))
        self.infos: list[ReplicaInfo] = [each.recv() for each in self._connections.values()]

    def begin(self, replica: int, tasks: list[Task], aborted: list[int]) -> None:
        self._connections[replica].send(("work", (tasks, aborted)))
        self._working.add(replica)

    def wait(self) -> None:
        wait([self._connections[replica] for replica in self._working])

    def answers(self) -> list[tuple[int, StepOutput | Lost]]:
        ready = [replica for replica in self._working if self._connections[replica].poll()]
        self._working.difference_update(ready)
        return [(replica, self._connections[replica].recv()) for replica in ready]

    def ask(self, replica: int, method: str) -> Any:
        self._connections[replica].send((method, ()))
        return self._connections[replica].recv()

    def end(self, replica: int) -> None:
        self._connections.pop(replica).close()
        self._processes.pop(replica).join()

    def close(self) -> None:
        for replica in list(self._connections):
            self.end(replica)


def tokens_per_second(llm: LLM, seed: int, num_requests: int, max_len: int) -> float:
    """Output tokens only; a cold prefix cache."""
    workload = offline_workload(seed, num_requests, max_len, llm.model_config.vocab_size)
    sampling_params = workload.sampling_params()
    llm.reset_prefix_cache()
    begin = perf_counter()
    outputs = llm.generate(workload.prompts, sampling_params, use_tqdm=False)
    seconds = perf_counter() - begin
    lengths = [len(output.token_ids) for output in outputs]
    if lengths != list(workload.max_tokens):
        raise RuntimeError(f"some of {num_requests} requests ended early: {outputs[0].error}")
    return sum(lengths) / seconds


def measure(
    options: argparse.Namespace, model: Path | None, engine: dict[str, Any]
) -> dict[str, Any]:
    """Rates of each run, by number of engines, and their ratio."""
    # Actors first: they leave nothing on a GPU, while a closed engine leaves its CUDA context.
    rates: dict[int, list[float]] = {options.size: [], 1: []}
    for size, runs in rates.items():
        with LLM(model, data_parallel_size=size, **engine) as llm:
            tokens_per_second(llm, WARM_UP_SEED, size * 16, options.max_len)
            for seed in range(options.runs):
                num_requests = size * options.requests
                runs.append(tokens_per_second(llm, seed, num_requests, options.max_len))
    many, one = (statistics.median(runs) for runs in rates.values())
    return {"tokens_per_second": rates, "scaling": many / one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="directory or synthetic:NAME; not given: the embedded one")
    parser.add_argument("--size", type=int, default=2, help="engines (default 2)")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="requests an engine")
    parser.add_argument("--max-len", type=int, default=MAX_LEN, help="longest prompt and output")
    parser.add_argument("--runs", type=int, default=3, help="of each size (default 3)")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--processes", action="store_true", help="not Ray's actors")
    options = parser.parse_args()
    engine = {"max_model_len": options.max_model_len, "skip_tokenizer": True}
    with ExitStack() as stack:
        model = stack.enter_context(model_directory(options.model)) if options.model else None
        if options.processes or find_spec("ray") is None:
            # The one place that a front gets its replicas from.
            stack.enter_context(patch("nanovllm.data_parallel.llm.RayPool", ProcessPool))
        report = measure(options, model, engine)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
