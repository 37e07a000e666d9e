"""Planted faults: the reference with one defect each, which the suite has to find.

A module for each group of requirements, and `tutorial` for what the tutorial's code gets wrong.
A suite that convicts the reference is wrong; one that acquits one of these is blind.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.conformance.faults import (
    admission,
    blocks,
    kv,
    prefix,
    sampling,
    scheduling,
    sequence,
    stopping,
    tutorial,
)
from nanovllm.conformance.faults.fault import Fault

__all__ = ["FAULTS", "Fault"]

_MODULES = (
    sequence,
    blocks,
    prefix,
    admission,
    scheduling,
    kv,
    sampling,
    stopping,
    tutorial,
)

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {fault.name: fault for module in _MODULES for fault in module.FAULTS}
)
assert len(FAULTS) == sum(len(module.FAULTS) for module in _MODULES), "two faults of one name"
