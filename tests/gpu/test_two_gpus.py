"""Two GPUs against one, token for token by rule R1 with HF transformers in float32 as the judge.

With fewer than two the module is not collected (`conftest.py`).
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_host import REAL_WEIGHTS
from teacher import MAX_TOLERANCE, Ids, Teacher
from tiny_models import make_checkpoint
from tp_engines import forked_ranks, pids, ranks_of, wait_for_end, wait_for_fault  # noqa: F401

from nanovllm import LLM, SamplingParams
from nanovllm.engine.decode_state import SeatUpdates
from nanovllm.engine.tensor_parallel import start
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("forked_ranks")

LIMIT = 10.0  # seconds, of TP-4
NUM_PROMPTS = 32
MAX_TOKENS = 64
MAX_PROMPT_LEN = 700
AMPLE_BLOCKS, SMALL_BLOCKS = 4096, 192
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
FILTERED = SamplingParams(
    temperature=0.8, seed=3, top_k=50, top_p=0.9, max_tokens=MAX_TOKENS, ignore_eos=True
)
HOST_SAMPLED = SamplingParams(
    temperature=0.8, seed=3, presence_penalty=0.1, max_tokens=MAX_TOKENS, ignore_eos=True
)

WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "graphs-not-ahead": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "preempting": {"num_kvcache_blocks": SMALL_BLOCKS},
    "chunked": {"max_num_batched_tokens": 320},
    "mixed": {"max_num_batched_tokens": 512, "scheduling_policy": "mixed"},
}


@contextmanager
def open_llm(path: Path, size: int = 2, **options: Any) -> Iterator[LLM]:
    defaults: dict[str, Any] = {
        "skip_tokenizer": True,
        "attention_backend": "triton",
        "num_kvcache_blocks": AMPLE_BLOCKS,
        "max_num_seqs": NUM_PROMPTS,
        "max_model_len": MAX_PROMPT_LEN + MAX_TOKENS,
    }
    with LLM(path, tensor_parallel_size=size, **defaults | options) as llm:
        yield llm


def generate(llm: LLM, prompts: list[Ids], params: SamplingParams = GREEDY) -> list[Ids]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["length"] * len(prompts)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def prompts() -> list[Ids]:
    """A quarter of them begin like another."""
    rng = random.Random(0)
    drawn = [
        [rng.randrange(151_000) for _ in range(rng.randint(1, MAX_PROMPT_LEN))]
        for _ in range(NUM_PROMPTS * 3 // 4)
    ]
    shared = [[*prompt[: rng.randint(1, len(prompt))], 7, 8] for prompt in drawn[-8:]]
    return drawn + [prompt[:MAX_PROMPT_LEN] for prompt in shared]


@pytest.fixture(scope="module")
def teacher(qwen3: Path) -> Iterator[Teacher]:
    yield Teacher(qwen3)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is quick to load, for what is not about its size."""
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        seed=1,
        vocab_size=2001,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        max_position_embeddings=MAX_PROMPT_LEN + MAX_TOKENS,
    )


@pytest.mark.spec("TP-1", "TP-8", "GRF-1")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_pass_the_judge_of_one(
    dtype: str, way: str, qwen3: Path, prompts: list[Ids], teacher: Teacher, figures
) -> None:
    caches = ("cold", "warm") if way == "graphs" else ("cold",)
    with open_llm(qwen3, dtype=dtype, **WAYS[way]) as llm:
        for cache in caches:
            before = llm.stats()
            outputs = generate(llm, prompts)
            after = llm.stats()
            preemptions = after.num_preemptions - before.num_preemptions
            cached = after.num_cached_tokens - before.num_cached_tokens
            found = teacher.judge(prompts, outputs, MAX_TOLERANCE[dtype])
            figures.setdefault("two ranks against HF in float32", []).append(
                {
                    "run": f"{dtype}-{way}-{cache}",
                    "preempted": preemptions,
                    "cached": cached,
                    "planned": found.strict.planned,
                    "compared": found.strict.compared,
                    "agreement": found.agreement,
                    "largest gap": found.largest_gap,
                }
            )
            assert (preemptions > 0) == (way == "preempting")
            if cache == "warm":
                assert cached > 0.8 * sum(map(len, prompts))
            assert found.agreement >= 0.9
            if REAL_WEIGHTS not in os.environ:
                found.strict.require_exercised()


@pytest.mark.spec("TP-1", "TP-3a", "TP-8")
@pytest.mark.parametrize(
    "params",
    [GREEDY, SAMPLED, FILTERED, HOST_SAMPLED],
    ids=["greedy", "device", "filtered", "host"],
)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_an_odd_vocabulary_gives_the_tokens_of_one_rank(
    small: Path, params: SamplingParams, eager: bool
) -> None:
    """In float32 nearly all tokens are the same ones, sampled or not."""
    prompts = [[(31 * i + j) % 2001 for j in range(5 + 9 * i)] for i in range(20)]
    options = {"dtype": "float32", "enforce_eager": eager}
    found = []
    for size in (1, 2):
        with open_llm(small, size, **options) as llm:
            found.append(generate(llm, prompts, params))
    equal = sum(
        a == b for one, two in zip(*found, strict=True) for a, b in zip(one, two, strict=True)
    )
    assert equal >= 0.9 * len(prompts) * MAX_TOKENS


@pytest.mark.spec("TP-7")
def test_short_sums_go_over_peer_memory_in_every_engine_of_a_process(small: Path) -> None:
    for _ in range(2):
        with open_llm(small) as llm:
            group = ranks_of(llm).group
            assert group is not None
            assert group.peers is not None
            generate(llm, [[1, 2, 3]])
            assert group.peers.for_sums.calls[0] > 0
            assert group.peers.for_norms.calls[0] > group.peers.for_sums.calls[0]


@pytest.mark.spec("TP-2")
def test_both_ranks_have_the_blocks_of_the_fuller_gpu(small: Path) -> None:
    """Somebody else has all but 4 GiB of the second one; the first could hold every sequence."""
    free, _ = torch.cuda.mem_get_info(1)
    taken = torch.empty(free - (4 << 30), dtype=torch.uint8, device="cuda:1")
    options = {"max_num_seqs": 2**13, "max_num_batched_tokens": 2**13, "enforce_eager": True}
    with open_llm(small, num_kvcache_blocks=None, **options) as llm:
        first, second = llm.model_runner.rank_infos
        assert (first.device, second.device) == ("cuda:0", "cuda:1")
        assert first.num_blocks == second.num_blocks == llm.stats().num_blocks
        assert first.num_blocks < 2**13 * llm.model_runner.max_blocks_per_seq
    del taken
    torch.cuda.empty_cache()


@pytest.mark.spec("TP-4")
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("steps", [0, 4], ids=["in prefill", "in decode"])
def test_a_rank_is_killed(small: Path, eager: bool, steps: int) -> None:
    """Rank 0 then waits for a sum on its device; the group is aborted under it."""
    prompts = [[5, 6, 7], [8] * 40]
    with open_llm(small, enforce_eager=eager) as llm:
        numbers = pids(llm)
        requests = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        for _ in range(steps):
            llm.step()
        os.kill(numbers[0], signal.SIGKILL)
        begin = time.monotonic()
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(requests):
            outputs |= {output.request_id: output for output in llm.step().outputs}
        assert time.monotonic() - begin < LIMIT
        causes = {outputs[request].samples[0].error for request in requests}
        assert causes == {"rank 1 was killed by SIGKILL"}
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            llm.add_request([1], GREEDY)
        assert wait_for_end(numbers, LIMIT)
    with open_llm(small, enforce_eager=eager) as llm:
        assert all(len(tokens) == MAX_TOKENS for tokens in generate(llm, prompts))


@pytest.mark.spec("TP-4")
def test_a_rank_is_killed_while_idle(small: Path) -> None:
    with open_llm(small) as llm:
        generate(llm, [[1, 2, 3]])
        os.kill(pids(llm)[0], signal.SIGKILL)
        assert wait_for_fault(llm, LIMIT) == "rank 1 was killed by SIGKILL"
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            llm.generate([1], GREEDY, use_tqdm=False)


@pytest.mark.spec("TP-4")
def test_a_device_error_of_another_rank(small: Path) -> None:
    """A table entry that does not exist. CUDA notices when that rank is in no call."""
    nothing = np.zeros(0, dtype=np.int64)
    broken = SeatUpdates(
        table_index=np.array([2**40]),
        table_value=np.zeros(1, dtype=np.int32),
        seats=nothing,
        temperature=nothing.astype(np.float32),
        top_k=nothing.astype(np.int32),
        top_p=nothing.astype(np.float32),
        min_p=nothing.astype(np.float32),
        stream=nothing,
    )
    with open_llm(small, enforce_eager=True) as llm:
        generate(llm, [[1, 2, 3]])
        with ranks_of(llm).told("update", broken):
            pass
        assert "CUDA error" in (wait_for_fault(llm, LIMIT) or "none")
        with pytest.raises(RuntimeError, match="this engine has failed: rank 1: "):
            llm.add_request([1], GREEDY)


@pytest.mark.spec("TP-4", "TP-1")
def test_spawned_as_a_user_has_it(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the tests' fork server; two engines after each other."""
    monkeypatch.setattr(start, "START_METHOD", "spawn")
    found = []
    for _ in range(2):
        with open_llm(small) as llm:
            found.append(generate(llm, [[1, 2, 3]]))
    assert found[0] == found[1]


@pytest.mark.spec("TP-3c")
def test_more_ranks_than_devices_are_refused(small: Path) -> None:
    size = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=f"{size - 1} CUDA devices"):
        LLM(small, tensor_parallel_size=size)
