"""The tutorial's open questions as experiments: `nanovllm study`.

Each is a small program that drives the engine at its core door, with the suite's shadow KV as the
model and all of its checks on, and prints what it measured. Everything but CPU time is the same on
every run. docs/questions.md has the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.study.findings import Findings


@dataclass(frozen=True, slots=True)
class Study:
    """A module of this package, named with dashes, whose `study()` does the work."""

    name: str
    question: str

    def run(self) -> Findings:
        findings: Findings = import_module(f"{__name__}.{self.name.replace('-', '_')}").study()
        return findings


STUDIES = (
    Study("block-size", "how large should a block be?"),
    Study("victim", "who should give way when blocks are short?"),
    Study("prefix-index", "why a chain of hashes, and not a tree?"),
    Study("graph-shapes", "why does decode fit a graph, and prefill not?"),
    Study("temperature", "can requests of different temperatures share KV?"),
)


def study_of(name: str) -> Study:
    """Raises ValueError, with the names there are."""
    for study in STUDIES:
        if study.name == name:
            return study
    raise ValueError(f"no study {name!r}; there are {', '.join(s.name for s in STUDIES)}")
