"""What changed in the calls of the tutorial's classes from one generation to the next.

preset  can_allocate(seq)      allocate       postprocess                  count of a prefill
2025    bool                   (seq)          (seqs, token_ids)            all that is uncached
2026    cached blocks, or -1   (seq, cached)  (seqs, token_ids, prefill)   num_scheduled_tokens
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple


class Calls(NamedTuple):
    """What changed between the generations."""

    counts: bool
    """`can_allocate` returns the number of cached blocks, and `allocate` takes it."""
    told_prefill: bool
    """`postprocess` is told whether the step was a prefill."""
    chunks: bool
    """The scheduler says how many tokens of a sequence it scheduled."""


PRESETS = {"2025": Calls(False, False, False), "2026": Calls(True, True, True)}


def detect(modules: SimpleNamespace) -> Calls:
    def arity(function: Callable[..., Any]) -> int:
        return len(inspect.signature(function).parameters)

    scheduler = modules.scheduler and modules.scheduler.Scheduler
    return Calls(
        counts=arity(modules.block_manager.BlockManager.allocate) > 2,
        told_prefill=bool(scheduler) and arity(scheduler.postprocess) > 3,
        chunks="num_scheduled_tokens" in inspect.getsource(modules.sequence.Sequence),
    )


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the keyword arguments that `function` has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def config_defaults(scheduler: ModuleType) -> dict[str, Any]:
    """Fields that a fork has added to the engine's config, as that fills them in."""
    config = getattr(scheduler, "Config", None)
    if config is None or not dataclasses.is_dataclass(config):
        return {}
    fields = dataclasses.fields(config)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def hashes() -> dict[str, Callable[..., int]]:
    """Hash functions to put in place of the engine's; `none` never gives the same value twice,
    which is how the prefix cache is turned off."""
    numbers = itertools.count()
    return {
        "constant": lambda token_ids, prefix=-1: 1,
        "1bit": lambda token_ids, prefix=-1: (sum(token_ids) + prefix) % 2,
        "none": lambda token_ids, prefix=-1: next(numbers),
    }
