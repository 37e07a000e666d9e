"""Legal variants: the reference with one decision taken otherwise, as other engines take it.

Each keeps every requirement that is a must. What convicts one of them is a taste, not a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanovllm.conformance.variants import ahead, engines, policies
from nanovllm.conformance.variants.variant import Variant

__all__ = ["VARIANTS", "Variant"]

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {variant.name: variant for module in (policies, engines, ahead) for variant in module.VARIANTS}
)
