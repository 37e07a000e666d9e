"""Where a measurement was made: without it, a figure means nothing."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nanovllm import __version__

LIBRARIES = ("torch", "triton", "flash-attn", "transformers")


def machine_info() -> dict[str, str | None]:
    """Device, versions, commit and date; None for what is not there."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_gib": f"{torch.cuda.mem_get_info()[1] / 2**30:.0f}" if cuda else None,
        "cuda": torch.version.cuda,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "nanovllm": __version__,
        **{library: _version(library) for library in LIBRARIES},
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the source tree, `-dirty` if it differs; None for an installed package."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
