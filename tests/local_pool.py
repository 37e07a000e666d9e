"""Replicas in the test's own process, in place of Ray's: each works when waited for, or dies."""

from dataclasses import fields
from typing import Any

from nanovllm.config import Config
from nanovllm.data_parallel.dispatcher import Lost
from nanovllm.data_parallel.replica import Replica, Task
from nanovllm.outputs import StepOutput


class LocalPool:
    """A `Pool`. Each answer is that of one engine step, and the replicas take turns.

    `deaths` says after how many answers a replica is lost; `ended` which were ended.
    """

    def __init__(self, config: Config) -> None:
        own = ("model", "data_parallel_size", "seed")
        options = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in own}
        self.replicas = [Replica(period=0) for _ in range(config.data_parallel_size)]
        self.infos = [replica.start(config.model, options) for replica in self.replicas]
        self.calls: dict[int, tuple[list[Task], list[int]]] = {}
        self.deaths: dict[int, int] = {}
        self.sent: dict[int, list[int]] = {i: [] for i in range(len(self.replicas))}
        self.ended: list[int] = []

    def begin(self, replica: int, tasks: list[Task], aborted: list[int]) -> None:
        assert replica not in self.calls
        self.sent[replica] += [task.request_id for task in tasks]
        self.calls[replica] = (tasks, aborted)

    def wait(self) -> None:
        assert self.calls

    def answers(self) -> list[tuple[int, StepOutput | Lost]]:
        replica = next(iter(self.calls))  # the one that has waited longest
        call = self.calls.pop(replica)
        if self._dies(replica):
            return [(replica, Lost("planted"))]
        try:
            return [(replica, self.replicas[replica].work(*call))]
        except RuntimeError as error:
            return [(replica, Lost(str(error)))]

    def _dies(self, replica: int) -> bool:
        self.deaths[replica] = self.deaths.get(replica, -1) - 1
        return self.deaths[replica] == -1

    def ask(self, replica: int, method: str) -> Any | Lost:
        return getattr(self.replicas[replica], method)()

    def end(self, replica: int) -> None:
        self.calls.pop(replica, None)
        self.ended.append(replica)

    def close(self) -> None:
        for replica in self.replicas:
            replica.llm.close()
