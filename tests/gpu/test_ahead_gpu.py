"""One step ahead or not: the same outcome of the same requests, on the device.

In float32, where a request's tokens do not depend on who else is in a batch: with a step in flight
other requests share it.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ahead_or_not import assert_same

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

NUM_REQUESTS, MAX_PROMPT_LEN, MAX_TOKENS = 48, 500, 96
BLOCK_SIZE, AMPLE_BLOCKS, SMALL_BLOCKS = 16, 2048, 160
STEPS_BEFORE_ABORT = 40
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.05, "n": 2},
    {"temperature": 0.8, "presence_penalty": 0.2},  # drawn by the host: lands every step first
    {"temperature": 0.0, "logprobs": 2},
]

Work = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def work(qwen3: Path) -> Work:
    """A third of them stops half-way, which a step ahead learns of too late."""
    rng = random.Random(0)
    work: Work = []
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(150_000) for _ in range(rng.randint(1, MAX_PROMPT_LEN))]
        kind = KINDS[i % len(KINDS)]
        count = rng.randint(MAX_TOKENS // 2, MAX_TOKENS)
        work.append((prompt, SamplingParams(seed=i, max_tokens=count, ignore_eos=True, **kind)))
    plain, _ = run(qwen3, work, False, AMPLE_BLOCKS, ())
    for i in range(1, NUM_REQUESTS, 3):
        tokens = plain[i].token_ids
        stop = tokens[len(tokens) // 2]
        work[i] = (work[i][0], replace(work[i][1], stop_token_ids=(stop,)))
    return work


def run(
    path: Path, work: Work, ahead: bool, num_blocks: int, aborted: tuple[int, ...], **options: Any
) -> tuple[list[RequestOutput], int]:
    """Outputs in the order of `work`, and how often a request was preempted."""
    with LLM(
        path,
        skip_tokenizer=True,
        dtype="float32",
        attention_backend="triton",
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=num_blocks,
        max_num_seqs=32,
        max_model_len=MAX_PROMPT_LEN + MAX_TOKENS,
        async_scheduling=ahead,
        **options,
    ) as llm:
        assert llm.model_runner.steps_ahead == ahead
        ids = [llm.add_request(prompt, params) for prompt, params in work]
        outputs: dict[int, RequestOutput] = {}
        num_steps = 0
        while not llm.is_finished():
            if num_steps == STEPS_BEFORE_ABORT:
                for i in aborted:
                    assert llm.abort_request(ids[i])
            outputs |= {output.request_id: output for output in llm.step().outputs}
            num_steps += 1
        stats = llm.stats()
        assert stats.num_free_blocks == num_blocks
        return [outputs[i] for i in ids], stats.num_preemptions


@pytest.mark.spec("SCH-8", "SCH-12a", "SCH-12c", "SCH-13", "SMP-4")
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": AMPLE_BLOCKS},
        {"num_blocks": SMALL_BLOCKS},
        {"num_blocks": AMPLE_BLOCKS, "enforce_eager": True},
        {"num_blocks": SMALL_BLOCKS, "max_num_batched_tokens": 256, "scheduling_policy": "mixed"},
    ],
    ids=["graphs", "preempting", "eager", "mixed"],
)
def test_a_step_ahead_changes_no_outcome(options: dict[str, Any], qwen3: Path, work: Work) -> None:
    aborted = tuple(range(2, 32, 6))
    (expected, _), (found, preemptions) = (
        run(qwen3, work, ahead, aborted=aborted, **options) for ahead in (False, True)
    )
    assert (preemptions > 0) == (options["num_blocks"] == SMALL_BLOCKS)
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    assert {s.finish_reason for o in found for s in o.samples} == {"length", "stop", "abort"}
    gone = {i for i, o in enumerate(found) if o.finish_reason == "abort"}
    assert gone == set(aborted)
