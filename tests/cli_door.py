"""The command line as its tests use it: in this process or in one of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from nanovllm import SamplingParams
from nanovllm.cli import build_app

POOL = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, "max_num_seqs": 4}
POOL_ARGS = ["--block-size", "4", "--num-blocks", "64", "--max-num-seqs", "4"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
GREEDY_ARGS = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


def invoke(*args: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(build_app(), [str(arg) for arg in args], input=stdin)


def command(*args: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    """The command in a process of its own, on one thread."""
    program = [sys.executable, "-c", "from nanovllm.cli import main; main()"]
    return subprocess.Popen(
        [*program, *map(str, args)], env=os.environ | {"OMP_NUM_THREADS": "1"}, **options
    )


def interrupt_after(monkeypatch: pytest.MonkeyPatch, pieces: list[int]) -> list[str]:
    """Raises SIGINT once for each item, while that piece is printed; returns what was printed."""
    printed: list[str] = []

    def echo(text: str = "\n", nl: bool = True) -> None:
        printed.append(text)
        for _ in range(pieces.count(len(printed))):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(typer, "echo", echo)
    return printed
