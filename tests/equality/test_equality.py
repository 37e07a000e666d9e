"""Token for token: our outputs under every condition against HF transformers, in float32."""

import os

import pytest
from conditions import FACTORS, all_conditions, name_of, options_of, pairwise
from subjects import CI_MODELS, MODELS, greedy

from nanovllm import LLM, SamplingParams

DEEP = os.environ.get("NANOVLLM_PROFILE") == "deep"
CONDITIONS = (
    all_conditions({"model": MODELS, **FACTORS})
    if DEEP
    else pairwise(all_conditions({"model": CI_MODELS, **FACTORS}))
)


@pytest.mark.spec("MOD-1", "MOD-2", "PFX-12", "SCH-9", "SCH-14")
@pytest.mark.parametrize("condition", CONDITIONS, ids=name_of)
def test_outputs_equal_transformers(condition, subjects, figures):
    subject = subjects.get(condition["model"])
    with LLM(subject.path, skip_tokenizer=True, **options_of(condition)) as llm:
        if condition["cache"] == "warm":
            warm_up(llm, subject.prompts)
        before = llm.stats()
        outputs = greedy(llm, subject.prompts)
        after = llm.stats()
    preemptions = after.num_preemptions - before.num_preemptions
    cached = after.num_cached_tokens - before.num_cached_tokens

    against_hf = subject.rule.compare(subject.prompts, outputs, subject.reference)
    against_own = subject.rule.compare(subject.prompts, outputs, subject.plain)
    figures.setdefault("equality with HF transformers", []).append(
        {
            "condition": name_of(condition),
            "requests": against_hf.requests,
            "preempted": preemptions,
            "cached": cached,
            "planned": against_hf.planned,
            "vs HF": against_hf.compared,
            "vs ours": against_own.compared,
        }
    )
    against_hf.require_exercised()
    against_own.require_exercised()
    assert (preemptions > 0) == (condition["pool"] == "small")
    if condition["cache"] != "cold":
        assert (cached > 0) == (condition["cache"] == "warm")


def warm_up(llm: LLM, prompts: list[list[int]]) -> None:
    """Compute all prompts. In a small pool the last ones survive, so they are those asked first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate(prompts[::-1], params, use_tqdm=False)
