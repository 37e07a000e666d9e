"""The checks of the core door, each for one requirement, none knowing of another."""

from __future__ import annotations

from nanovllm.conformance.checks import (
    blocks,
    cache,
    data,
    ends,
    hits,
    refusals,
    samples,
    scheduling,
)
from nanovllm.conformance.checks.check import Check

__all__ = ["CHECKS", "Check"]

MODULES = (blocks, cache, data, ends, hits, refusals, samples, scheduling)

CHECKS: tuple[Check, ...] = tuple(
    value for module in MODULES for value in vars(module).values() if isinstance(value, Check)
)
