"""Replicas as Ray actors. Nothing else imports Ray, and this only when it is needed."""

from __future__ import annotations

import logging
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.data_parallel.dispatcher import Lost
from nanovllm.data_parallel.replica import Replica, ReplicaInfo, Task
from nanovllm.engine.runners import resolve_device
from nanovllm.outputs import StepOutput


class RayPool:
    """`data_parallel_size` actors, a replica each; a `Pool`.

    It uses the Ray that the caller has initialised, maybe of a whole cluster; if there is none, it
    starts one on this host and shuts it down at `close`.

    Raises ValueError if Ray cannot be imported or has too few CPUs or GPUs, and what `LLM` raises.
    """

    def __init__(self, config: Config) -> None:
        self._ray = import_ray()
        self._calls: dict[Any, int] = {}  # replica by the reference to its answer
        needs = resources(config)
        size = config.data_parallel_size
        self._started = not self._ray.is_initialized()
        if self._started:
            self._ray.init(
                address="local",
                num_cpus=int(size * needs["CPU"]),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        self._actors: dict[int, Any] = {}
        try:
            check_resources(needs, size, self._ray.cluster_resources())
            actor = self._ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"])(Replica)
            self._actors = {replica: actor.remote() for replica in range(size)}
            self.infos: list[ReplicaInfo] = self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: Config) -> list[ReplicaInfo]:
        own = {"model", "data_parallel_size", "seed"}
        options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in own}
        # An actor need not have this process's working directory.
        model = Path(config.model).absolute()
        starts = [actor.start.remote(model, options) for actor in self._actors.values()]
        try:
            infos: list[ReplicaInfo] = self._ray.get(starts)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        return infos

    def begin(self, replica: int, tasks: list[Task], aborted: list[int]) -> None:
        self._calls[self._actors[replica].work.remote(tasks, aborted)] = replica

    def wait(self) -> None:
        self._ray.wait(list(self._calls), num_returns=1)

    def answers(self) -> list[tuple[int, StepOutput | Lost]]:
        calls = list(self._calls)
        ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        return [(self._calls[call], self._answer(self._calls.pop(call), call)) for call in ready]

    def ask(self, replica: int, method: str) -> Any | Lost:
        return self._answer(replica, getattr(self._actors[replica], method).remote())

    def _answer(self, replica: int, call: Any) -> Any | Lost:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            return Lost(f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            cause = str(error).partition("\n")[0]
            return Lost(f"process {self.infos[replica].pid}: {type(error).__name__}: {cause}")

    def end(self, replica: int) -> None:
        self._calls = {call: i for call, i in self._calls.items() if i != replica}
        self._ray.kill(self._actors.pop(replica))

    def close(self) -> None:
        for replica in list(self._actors):
            self.end(replica)
        if self._started:
            self._ray.shutdown()


def import_ray() -> Any:
    """The package; ValueError, saying what to do, if it is not there."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ValueError(
            f"data_parallel_size > 1 needs Ray, which cannot be imported ({error}); "
            "pip install 'nanovllm[ray]'"
        ) from error


def resources(config: Config) -> dict[str, int]:
    """What one replica takes, in Ray's names: a CPU, and on CUDA a GPU, for each of its ranks."""
    # The GPUs may be on other hosts than this process.
    on_gpu = config.device == "cuda" or resolve_device(config.device).type == "cuda"
    ranks = config.tensor_parallel_size
    return {"CPU": ranks, "GPU": ranks if on_gpu else 0}


def check_resources(needs: dict[str, int], size: int, found: dict[str, float]) -> None:
    """Raises ValueError if Ray would wait forever for what it will never have."""
    for name, each in needs.items():
        if size * each > found.get(name, 0):
            raise ValueError(
                f"data_parallel_size={size} takes {size * each} {name}s, {each} a replica, "
                f"but Ray has {found.get(name, 0):g}"
            )
