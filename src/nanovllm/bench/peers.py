"""The same work on another engine, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nanovllm
from nanovllm.bench.workload import TEMPERATURE, Workload

PEERS = ("nano-vllm", "vllm", "hf")
WORKER = Path(__file__).with_name("peer_worker.py")


@dataclass(frozen=True)
class PeerRun:
    """Figures of one peer: seconds and output tokens a second by seed, ms a step by batch size."""

    name: str
    version: str
    throughput: dict[int, tuple[float, float]] = field(default_factory=dict)
    latency_ms: dict[int, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Peer:
    """How to run one.

    Args:
        name: one of `PEERS`.
        python: interpreter of the environment that it is installed in.
        path: directory to import it from, if it is not installed.
    """

    name: str
    python: str = sys.executable
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.name not in PEERS:
            raise ValueError(f"--peer must be one of {', '.join(PEERS)}, got {self.name!r}")

    def times(
        self, model: Path, max_model_len: int, work: Sequence[Workload]
    ) -> tuple[str, list[float]]:
        """Its version, and the seconds that it took for each of the workloads, one by one.

        Raises ValueError if it cannot be imported or fails, with what it said.
        """
        job = {
            "peer": self.name,
            "model": str(model),
            "max_model_len": max_model_len,
            "temperature": TEMPERATURE,
            "not_this": str(Path(nanovllm.__file__).parent),
            "runs": [{"prompts": w.prompts, "max_tokens": w.max_tokens} for w in work],
        }
        with tempfile.TemporaryDirectory(prefix="nanovllm-peer-") as directory:
            asked, answered = Path(directory, "job.json"), Path(directory, "result.json")
            asked.write_text(json.dumps(job))
            self._work(asked, answered, directory)
            result: dict[str, Any] = json.loads(answered.read_text())
        return result["version"], result["seconds"]

    def _work(self, asked: Path, answered: Path, directory: str) -> None:
        environment = dict(os.environ)
        if self.path is not None:
            environment["PYTHONPATH"] = str(self.path.resolve())
        command = [self.python, str(WORKER), str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, cwd=directory, env=environment, capture_output=True, text=True
            )
        except OSError as error:
            raise ValueError(f"--peer-python {self.python} does not start: {error}") from error
        if done.returncode or not answered.is_file():
            said = "\n  ".join(done.stderr.strip().splitlines()[-5:])
            raise ValueError(f"peer {self.name} ended with code {done.returncode}:\n  {said}")
