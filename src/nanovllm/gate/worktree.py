"""A revision's files beside the ones that are being worked on."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nanovllm.gate.suite import GateError

_OF_A_HOOK = (
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
)
"""Where git tells its hooks their index and their tree, which are not those of the base."""

_NO_SOURCE = (":(exclude,glob)**/__pycache__/**", ":(exclude,glob)**/*.egg-info/**")


@contextmanager
def worktree(revision: str, directory: Path, measured: Sequence[str] = (".",)) -> Iterator[Path]:
    """The directory as it was in a revision, in a work tree that is removed afterwards.

    GateError if there is no such revision, and if what is measured, paths of the directory, is what
    it was there: compared with itself, everything is green.
    """
    same = _git(directory, "rev-parse", f"{revision}^0") == _git(directory, "rev-parse", "HEAD")
    if same and not _git(directory, "status", "--porcelain", "--", *measured, *_NO_SOURCE):
        raise GateError(f"the base {revision!r} is this tree itself; after a push it is HEAD~1")
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve() / "base"
        inside = _git(directory, "rev-parse", "--show-prefix")
        _git(directory, "worktree", "add", "--detach", str(top), revision)
        try:
            yield top / inside
        finally:
            _git(directory, "worktree", "remove", "--force", str(top))


def _git(directory: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    done = subprocess.run(
        ("git", "-C", str(directory), *arguments),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise GateError(
            f"git {arguments[0]}: {done.stderr.strip()}\n"
            "The gate needs the history: fetch it, or name a revision that is there."
        )
    return done.stdout.strip()
