"""One step ahead or not: any story of requests gives the same tokens, texts and reasons.

A story is replayed by an engine whose runner hands its tokens over late, and by one that plans a
step only when it knows all tokens. A request that is aborted, or is in a step that fails, may have
got further in one of them: there what both have has to be equal.
"""

from pathlib import Path

import pytest
from ahead_or_not import SIZES, assert_same, late_runners, make_flat_checkpoint
from hypothesis import given, settings
from stories import EVENTS, FAILURES, Event, Told, replay, show_all, stories

from nanovllm import LLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flat_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.spec("SCH-12a", "SCH-12b", "SCH-12c", "SCH-13", "SCH-15", "SCH-8", "STP-3a")
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_a_step_ahead_changes_no_story(checkpoint: Path, policy: str) -> None:
    seen: set[str] = set()
    options = {"max_num_batched_tokens": 8, "scheduling_policy": policy, "num_kvcache_blocks": 10}

    def told(ahead: int, story: list[Event]) -> Told:
        with late_runners(ahead), LLM(checkpoint, **SIZES, **options) as llm:
            return replay(llm, story)

    @settings(max_examples=settings().max_examples // 10)
    @given(stories(*EVENTS, FAILURES))
    def check(story: list[Event]) -> None:
        plain, late = (told(ahead, story) for ahead in (0, 1))
        for one, other in zip(plain.outputs, late.outputs, strict=True):
            assert_same(one, other)
            seen.update(str(s.finish_reason) for s in other.samples)
        assert not plain.num_in_flight
        seen.update(["in flight"] * late.num_in_flight + ["preempted"] * late.num_preemptions)

    check()
    if show_all():
        assert seen == {"stop", "length", "abort", "error", "in flight", "preempted"}
