"""One step ahead or not: any story of requests gives the same tokens, texts and reasons.

A story is replayed by an engine whose runner hands its tokens over late, and by one that plans a
step only when it knows all tokens. A request that is aborted, or is in a step that fails, may have
got further in one of them: there what both have has to be equal.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ahead_or_not import (
    ALPHABET,
    KINDS,
    SIZES,
    assert_same,
    late_runners,
    make_flat_checkpoint,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

NUM_BLOCKS = 10
MORE_KINDS = [*KINDS, {"stop_token_ids": tuple(range(120))}]


class Add(NamedTuple):
    prompt: str
    params: SamplingParams


class Steps(NamedTuple):
    count: int


class Abort(NamedTuple):
    """The request that came this many before the last; steps may be in flight."""

    age: int


class Fail(NamedTuple):
    """The next step fails: when it is launched, or when its tokens are asked for."""

    at_launch: bool


Event = Add | Steps | Abort | Fail


@st.composite
def additions(draw: st.DrawFn) -> Add:
    values = {"temperature": 2.0, **draw(st.sampled_from(MORE_KINDS))}
    return Add(
        draw(st.text(ALPHABET, min_size=1, max_size=14)),
        SamplingParams(
            seed=draw(st.integers(0, 99)), max_tokens=draw(st.sampled_from([1, 3, 6, 17])), **values
        ),
    )


STORIES = st.lists(
    st.one_of(
        additions(),
        additions(),
        st.builds(Steps, st.integers(1, 6)),
        st.builds(Abort, st.integers(0, 3)),
        st.builds(Fail, st.booleans()),
    ),
    min_size=4,
    max_size=16,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flat_checkpoint(tmp_path_factory.mktemp("model"))


class Told(NamedTuple):
    """What an engine told of a story."""

    outputs: dict[int, RequestOutput]
    num_in_flight: int
    num_preemptions: int


def replay(checkpoint: Path, story: list[Event], ahead: int, **options: Any) -> Told:
    """Step by step to the end; nothing may be lost."""
    with late_runners(ahead) as runner:
        llm = LLM(checkpoint, num_kvcache_blocks=NUM_BLOCKS, **SIZES, **options)
    ids: list[int] = []
    outputs: dict[int, RequestOutput] = {}
    num_in_flight = 0
    with llm:
        for happening in [*story, Steps(1000)]:
            match happening:
                case Add(prompt, params):
                    ids.append(llm.add_request(prompt, params))
                case Abort(age) if age < len(ids):
                    num_in_flight += len(llm.scheduler.in_flight)
                    llm.abort_request(ids[-1 - age])
                case Fail(at_launch):
                    where = "fail_launch" if at_launch else "fail_result"
                    failing = getattr(runner, where) | {llm.scheduler.stats.num_steps}
                    setattr(runner, where, failing)
                    num_in_flight += len(llm.scheduler.in_flight)
                case Steps(count):
                    for _ in range(count):
                        if llm.is_finished():
                            break
                        outputs |= {o.request_id: o for o in llm.step().outputs}
        assert llm.is_finished()
        llm.step()  # what was planned ahead of the last end lands
        stats = llm.stats()
        assert stats.num_free_blocks == NUM_BLOCKS
        assert not llm.scheduler.in_flight
    assert sorted(outputs) == ids
    return Told(outputs, num_in_flight, stats.num_preemptions)


@pytest.mark.spec("SCH-12a", "SCH-12b", "SCH-12c", "SCH-13", "SCH-15", "SCH-8", "STP-3a")
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_a_step_ahead_changes_no_story(checkpoint: Path, policy: str) -> None:
    seen: set[str] = set()

    @settings(max_examples=settings().max_examples // 10)
    @given(STORIES)
    def check(story: list[Event]) -> None:
        options = {"max_num_batched_tokens": 8, "scheduling_policy": policy}
        plain, late = (replay(checkpoint, story, ahead, **options) for ahead in (0, 1))
        for request_id, output in plain.outputs.items():
            assert_same(output, late.outputs[request_id])
            seen.update(str(s.finish_reason) for s in late.outputs[request_id].samples)
        assert not plain.num_in_flight
        seen.update(["in flight"] * late.num_in_flight + ["preempted"] * late.num_preemptions)

    check()
    assert seen == {"stop", "length", "abort", "error", "in flight", "preempted"}
