"""The runner of CUDA, on a CPU: in any story it gives what the plain one gives, with any room.

The plain runner has a pool that holds all and no budget that cuts a prompt; the other one preempts,
comes back in chunks and to other seats, and may be one step ahead.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ahead_or_not import SIZES, assert_same
from cuda_on_cpu import put_on_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import EVENTS, Event, long_ones, replay, show_all, stories
from tiny_models import make_checkpoint

from nanovllm import LLM


def rooms(min_blocks: int) -> st.SearchStrategy[dict[str, int]]:
    """Of few blocks, which are enough for one request."""
    return st.fixed_dictionaries(
        {
            "num_kvcache_blocks": st.integers(min_blocks, min_blocks + 2),
            "max_num_batched_tokens": st.integers(5, 9),
            "max_num_seqs": st.integers(2, 3),
            "enable_prefix_caching": st.sampled_from([False, False, True]),
            "async_scheduling": st.booleans(),
        }
    )


CASES = {  # events, blocks, and which share of the examples: preemptions are where things go wrong
    "crowds": ([long_ones()], 6, 6),
    "mixtures": (EVENTS, 8, 20),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits depend on every token before."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def roomy(checkpoint: Path) -> Iterator[LLM]:
    sizes = SIZES | {"num_kvcache_blocks": 400, "max_num_seqs": 32}
    with LLM(checkpoint, device="cpu", enable_prefix_caching=False, **sizes) as llm:
        yield llm


@pytest.mark.spec("KV-1", "SCH-8", "SCH-13", "PFX-2", "GRF-5")
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
@pytest.mark.parametrize("case", CASES)
def test_room_changes_no_story_on_cuda(
    checkpoint: Path, roomy: LLM, policy: str, case: str
) -> None:
    events, min_blocks, share = CASES[case]
    num_preemptions = 0
    options = SIZES | {"device": "cpu", "enforce_eager": True, "scheduling_policy": policy}

    @settings(max_examples=settings().max_examples // share)
    @given(stories(*events), rooms(min_blocks))
    def check(story: list[Event], room: dict[str, int]) -> None:
        nonlocal num_preemptions
        plain = replay(roomy, story)
        assert not plain.num_preemptions
        with pytest.MonkeyPatch.context() as patch:
            put_on_cuda(patch)
            with LLM(checkpoint, **options | room) as llm:
                found = replay(llm, story)
        for one, other in zip(plain.outputs, found.outputs, strict=True):
            assert_same(one, other)
        num_preemptions += found.num_preemptions

    check()
    assert num_preemptions or not show_all()
