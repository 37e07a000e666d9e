"""The few combinations that run by default leave out no pair."""

from itertools import combinations, product

import pytest
from conditions import FACTORS, all_conditions, pairwise
from subjects import CI_MODELS

EVERYTHING = {"model": CI_MODELS, **FACTORS}


@pytest.mark.spec("MOD-2")
def test_every_pair_of_values_occurs():
    chosen = pairwise(all_conditions(EVERYTHING))
    absent = {
        ((a, x), (b, y))
        for a, b in combinations(EVERYTHING, 2)
        for x, y in product(EVERYTHING[a], EVERYTHING[b])
        if not any(condition[a] == x and condition[b] == y for condition in chosen)
    }
    assert absent == {(("limits", "alone"), ("pool", "small"))}


@pytest.mark.spec("MOD-2")
def test_it_is_near_the_least_there_can_be_and_always_the_same():
    conditions = all_conditions(EVERYTHING)
    chosen = pairwise(conditions)
    least = len(EVERYTHING["model"]) * len(EVERYTHING["block_size"])
    assert least <= len(chosen) <= 1.2 * least
    assert chosen == pairwise(conditions)
