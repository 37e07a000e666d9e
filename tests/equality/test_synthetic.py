"""Synthetic weights must do what they are for: decide in bfloat16, and depend on the whole context.

A reduced shape on the CPU; tests/gpu/test_equality_gpu.py does the same at full size.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from teacher import Teacher
from test_attention_is_seen import CHANGES, tampered

from nanovllm import LLM, SamplingParams
from nanovllm.bench.synthetic import CHOICE_PERIOD, SHAPES, write_checkpoint

SHAPE = SHAPES["qwen3-0.6b"] | {
    "vocab_size": 6000,
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
NUM_PROMPTS = 16
NOTICED = ("first block dropped", "blocks of two requests swapped")
# The largest gap at which the two dtypes differed was 0.01; the logits' deviation is 0.5.
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("synthetic"), SHAPE)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(6000) for _ in range(33 + i % 16)] for i in range(NUM_PROMPTS)]


@pytest.fixture
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Its parameter is the dtype."""
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 512, "dtype": request.param}
    with LLM(path, skip_tokenizer=True, enable_prefix_caching=False, **options) as engine:
        yield engine


def greedy(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.spec("MOD-1")
@pytest.mark.parametrize("llm", ["bfloat16"], indirect=True)
def test_bfloat16_decides_as_float32(path, llm, prompts, figures) -> None:
    outputs = greedy(llm, prompts, 128)
    found = Teacher(path, device="cpu").judge(prompts, outputs, TOLERANCE)
    previous = [token for output in outputs for token in output[:-1]]
    following = [token for output in outputs for token in output[1:]]
    choices = np.array(previous) % CHOICE_PERIOD == 0
    succeeded = np.array(previous) + 1 == np.array(following)
    figures.setdefault("synthetic weights in bfloat16 against HF in float32", []).append(
        {
            "planned": found.strict.planned,
            "compared": found.strict.compared,
            "agreement": found.agreement,
            "largest gap": found.largest_gap,
            "choices": int(choices.sum()),
        }
    )
    found.strict.require_exercised()
    assert found.agreement >= 0.995
    assert choices.sum() >= NUM_PROMPTS
    assert succeeded[~choices].mean() >= 0.95
    assert not succeeded[choices].any()


@pytest.mark.spec("MOD-1")
def test_the_teacher_convicts_a_wrong_token(path) -> None:
    teacher = Teacher(path, device="cpu")
    right = list(range(CHOICE_PERIOD + 2, CHOICE_PERIOD + 8))
    prompt = [5, CHOICE_PERIOD + 1]
    found = teacher.judge([prompt], [right], TOLERANCE)
    assert (found.strict.compared, found.agreement, found.largest_gap) == (6, 1.0, 0.0)
    wrong = [*right[:3], 7, *right[4:]]
    with pytest.raises(AssertionError, match=r"output 3 is 7, whose logit is .* below HF's best"):
        teacher.judge([prompt], [wrong], TOLERANCE)
    excused = teacher.judge([prompt], [wrong], tolerance=1e3)
    assert excused.strict.compared == 3
    assert excused.agreeing < 6


@pytest.mark.spec("KV-1", "KV-5")
@pytest.mark.parametrize("llm", ["float32"], indirect=True)
def test_wrong_tables_change_the_outputs(llm, prompts, figures) -> None:
    right = greedy(llm, prompts, 192)
    shares = {}
    for change in NOTICED:
        with tampered(llm.model_runner, CHANGES[change]):
            wrong = greedy(llm, prompts, 192)
        shares[change] = np.mean([a != b for a, b in zip(right, wrong, strict=True)]).item()
    figures.setdefault("share of outputs that wrong tables change", []).append(
        {"model": "synthetic", **shares}
    )
    # One changed output convicts, and a comparison has dozens.
    assert min(shares.values()) >= 0.4, shares
