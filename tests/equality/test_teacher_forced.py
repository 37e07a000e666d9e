"""Logits after given texts, against HF transformers, and how much they decide."""

import pytest
from subjects import MODELS

# The largest logits are about 5 on the random models and 20 on the embedded one. R1's tolerance is
# twice the error and at most 1e-4.
FP32_TOLERANCE = 5e-5


@pytest.mark.spec("MOD-1", "MOD-2")
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(model, subjects, figures):
    subject = subjects.get(model)
    errors = subject.measured.errors
    figures.setdefault("teacher-forced logits in float32", []).append(
        {
            "model": model,
            **{f"error by {count}": error for count, error in errors.items()},
            "R1 tolerance": subject.rule.tolerance,
            "decided": subject.decided,
        }
    )
    assert max(errors.values()) <= FP32_TOLERANCE
    assert subject.decided >= 0.9
