"""Hypothesis profiles: `ci` is derandomised, `deep` for nights; `NANOVLLM_PROFILE` chooses."""

import os

from hypothesis import HealthCheck, Phase, settings

common = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.register_profile("ci", common, derandomize=True, max_examples=500)
settings.register_profile("dev", common, max_examples=50)
settings.register_profile("deep", common, max_examples=20_000)
settings.register_profile(
    "mutation", common, derandomize=True, max_examples=150, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("NANOVLLM_PROFILE", "ci"))
