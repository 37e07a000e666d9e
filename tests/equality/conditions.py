"""The conditions under which outputs must not change, and the combinations of them to run."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Condition = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

SMALL_POOL_SLOTS = 324  # the longest request stores 257 + 63 tokens

# Limits by name. A step of `chunked` has 7 tokens, and 4 sequences share them.
LIMITS = {
    "batch": {},
    "alone": {"max_num_seqs": 1},
    "chunked": {"max_num_seqs": 4, "max_num_batched_tokens": 7},
}

FACTORS: Mapping[str, Sequence[Any]] = {
    "block_size": (1, 4, 16, 256),
    "limits": tuple(LIMITS),
    "policy": ("prefill_first", "mixed"),
    "pool": ("ample", "small"),
    "cache": ("off", "cold", "warm"),
}


def is_legal(condition: Condition) -> bool:
    """A request that runs alone has the pool for itself: nothing could preempt it."""
    return (condition["limits"], condition["pool"]) != ("alone", "small")


def all_conditions(
    factors: Mapping[str, Sequence[Any]], legal: Callable[[Condition], bool] = is_legal
) -> list[Condition]:
    """The full product, without what is not legal."""
    products = product(*factors.values())
    return [c for values in products if legal(c := dict(zip(factors, values, strict=True)))]


def pairs(condition: Condition) -> set[Pair]:
    """Every pair of values of two factors that a condition exercises together."""
    return set(combinations(condition.items(), 2))


def pairwise(conditions: Sequence[Condition]) -> list[Condition]:
    """A few of the conditions that have every pair of values that all of them have.

    Greedy, and therefore the same each time: the next one is the first that adds most new pairs,
    and among these the one whose pairs were seen least so far, so that no value prevails.
    """
    pairs_of = [pairs(condition) for condition in conditions]
    missing, seen, chosen = set().union(*pairs_of), Counter(), []

    def merit(own: set[Pair]) -> tuple[int, int]:
        return len(own & missing), -sum(seen[pair] for pair in own)

    while missing:
        best = max(range(len(conditions)), key=lambda i: merit(pairs_of[i]))
        chosen.append(conditions[best])
        missing -= pairs_of[best]
        seen.update(pairs_of[best])
    return chosen


def name_of(condition: Condition) -> str:
    return "-".join(str(value) for value in condition.values())


def options_of(condition: Condition) -> dict[str, Any]:
    """Options of `LLM` for a condition."""
    block_size = condition["block_size"]
    small = -(-SMALL_POOL_SLOTS // block_size) + (block_size == 256)
    return {
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": small if condition["pool"] == "small" else 2**14 // block_size,
        "scheduling_policy": condition["policy"],
        "enable_prefix_caching": condition["cache"] != "off",
        **LIMITS[condition["limits"]],
    }
