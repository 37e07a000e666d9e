"""The judge itself: it must convict, count and refuse to pass on too little."""

import pytest
import torch
from rule_r1 import MAX_TOLERANCE, Comparison, RuleR1

PROMPT = [[7, 7]]


def rule(logits: list[float], error: float = 1e-5) -> RuleR1:
    return RuleR1(lambda token_ids: torch.tensor(logits), error)


@pytest.mark.spec("MOD-1")
def test_equal_outputs_are_compared_to_their_end():
    outputs = [[1, 2, 3]]
    assert rule([0.0]).compare(PROMPT, outputs, outputs) == Comparison(1, 3, 3)


@pytest.mark.spec("MOD-1")
def test_outputs_may_part_at_a_tie_and_count_up_to_there():
    found = rule([1.0, 1.0 - 1e-5, 0.0]).compare(PROMPT, [[2, 0, 5, 5]], [[2, 1, 6, 6]])
    assert found == Comparison(1, 1, 4)


@pytest.mark.spec("MOD-1")
@pytest.mark.parametrize("logits", [[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.5, 0.5, 1.0]])
def test_outputs_may_part_nowhere_else(logits):
    """Neither if only one of them is the oracle's choice, nor if they tie below it."""
    with pytest.raises(AssertionError, match="output 1 is 0 against 1"):
        rule(logits).compare(PROMPT, [[2, 0]], [[2, 1]])


@pytest.mark.spec("MOD-1")
def test_the_oracle_is_asked_after_the_common_prefix():
    asked = []

    def next_logits(token_ids: list[int]) -> torch.Tensor:
        asked.append(token_ids)
        return torch.zeros(3)

    RuleR1(next_logits, 1e-5).compare(PROMPT, [[2, 0, 1]], [[2, 1, 1]])
    assert asked == [[7, 7, 2]]


@pytest.mark.spec("MOD-1")
def test_a_missing_token_is_a_difference():
    with pytest.raises(AssertionError, match="2 tokens against 3"):
        rule([0.0]).compare(PROMPT, [[1, 2]], [[1, 2, 3]])


@pytest.mark.spec("MOD-1")
def test_tolerance_is_twice_the_error_and_bounded():
    assert rule([0.0], error=3e-6).tolerance == 6e-6
    assert rule([0.0], error=1.0).tolerance == MAX_TOLERANCE


@pytest.mark.spec("MOD-1")
@pytest.mark.parametrize("comparison", [Comparison(2, 89, 100), Comparison(0, 0, 0)])
def test_too_little_is_not_exercised(comparison):
    with pytest.raises(AssertionError, match="not exercised"):
        comparison.require_exercised()


@pytest.mark.spec("MOD-1")
def test_enough_is_enough():
    Comparison(2, 90, 100).require_exercised()
