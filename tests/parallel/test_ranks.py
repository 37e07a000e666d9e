"""What several ranks compute: the tokens of one, with one number of blocks and no more sums."""

import gc
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint
from tp_engines import pids, ranks_of, wait_for_end
from tp_faults import build_small

from nanovllm import LLM, SamplingParams
from nanovllm.engine.tensor_parallel import start
from nanovllm.layers.parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("forked_ranks")

LAYERS = 2
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=4, max_tokens=12, top_k=20, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 300 for j in range(9 + 6 * i)] for i in range(8)]

# Name of a case, the options that make it happen, and the statistic that shows that it did.
CASES: dict[str, tuple[dict, str]] = {
    "prefix hits": ({}, "num_cached_tokens"),
    "preemption, chunks, mixed steps": (
        {
            "scheduling_policy": "mixed",
            "max_num_batched_tokens": 24,
            "max_num_seqs": 6,
            "num_kvcache_blocks": 40,
        },
        "num_preemptions",
    ),
}


def outputs(llm: LLM) -> list[list[int]]:
    """Of all prompts twice, so that the second time finds the first one's blocks."""
    tokens = []
    for params in (GREEDY, SAMPLED):
        tokens += [o.token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    return tokens


@pytest.mark.spec("TP-1", "TP-3a", "TP-3b", "TP-8")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_are_those_of_one_rank(checkpoint: Path, size: int, case: str) -> None:
    options, statistic = CASES[case]
    found = []
    for ranks in (1, size):
        given = {"kvcache_block_size": 4, "num_kvcache_blocks": 400} | options
        with LLM(checkpoint, tensor_parallel_size=ranks, **given) as llm:
            found.append(outputs(llm))
            assert getattr(llm.stats(), statistic) > 0
    assert found[0] == found[1]


@pytest.mark.spec("TP-1", "TP-3b")
def test_eight_ranks(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=1, vocab_size=303)
    found = []
    for ranks in (1, 8):
        with LLM(path, tensor_parallel_size=ranks, skip_tokenizer=True) as llm:
            found.append([o.token_ids for o in llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.spec("TP-2")
def test_all_ranks_have_the_blocks_of_the_one_with_least_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacities = {1: 40, 2: 25, 3: 60}
    monkeypatch.setattr(start, "build_runner", partial(build_small, capacities))
    with LLM(checkpoint, tensor_parallel_size=4, kvcache_memory_gb=0.1) as llm:
        assert llm.model_runner._num_blocks_in_budget() > 60
        assert llm.stats().num_blocks == 25
        assert [info.num_blocks for info in llm.model_runner.rank_infos] == [25] * 4


@dataclass(frozen=True)
class Counting(TensorParallel):
    """Remembers the shape of everything it all-reduced."""

    reduced: list[tuple[int, ...]] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tuple(x.shape))
        return super().all_reduce(x)


@pytest.mark.spec("TP-7")
def test_two_all_reduces_a_layer_in_every_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "TensorParallel", Counting)
    with LLM(checkpoint, tensor_parallel_size=2, num_kvcache_blocks=50) as llm:
        llm.generate([PROMPTS[0], PROMPTS[1]], GREEDY, use_tqdm=False)
        reduced, num_steps = llm.model_runner.tp.reduced, llm.stats().num_steps
    rows = [len(PROMPTS[0]) + len(PROMPTS[1])] + [2] * (num_steps - 1)
    assert num_steps == GREEDY.max_tokens
    assert reduced == [(row, 64) for row in rows for _ in range(2 * LAYERS + 1)]


@pytest.mark.spec("TP-8")
def test_other_ranks_are_never_asked_for_a_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told which logits to compute, and what rank 0 draws arrives with the next step."""
    with LLM(checkpoint, tensor_parallel_size=2, num_kvcache_blocks=50) as llm:
        told = []
        real = ranks_of(llm).told

        def spy(method: str, *args):
            told.append((method, args))
            return real(method, *args)

        monkeypatch.setattr(ranks_of(llm), "told", spy)
        (output,) = llm.generate(PROMPTS[0], SAMPLED, use_tqdm=False)
    assert {method for method, _ in told} == {"compute_logits"}
    assert [args[0].input_ids.tolist() for _, args in told[1:]] == [
        [token] for token in output.token_ids[:-1]
    ]


@pytest.mark.spec("TP-5")
def test_a_step_of_256_prompts_of_1024_tokens(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=2, head_dim=2, max_position_embeddings=1100,
    )  # fmt: skip
    prompts = [[(i + j) % 300 for j in range(1024)] for i in range(256)]
    params = SamplingParams(temperature=0, max_tokens=1)
    options = {"max_num_batched_tokens": 2**18, "num_kvcache_blocks": 256 * 65}
    found = []
    for ranks, count in ((1, 4), (2, 256)):
        with LLM(path, tensor_parallel_size=ranks, skip_tokenizer=True, **options) as llm:
            outputs = llm.generate(prompts[:count], params, use_tqdm=False)
            found.append([o.token_ids for o in outputs])
            assert llm.stats().num_steps == 1
    assert found[0] == found[1][:4]


@pytest.mark.spec("TP-3c")
def test_what_cannot_split_is_refused_with_its_numbers(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="num_attention_heads = 8 does not split over 3 ranks"):
        LLM(checkpoint, tensor_parallel_size=3)


@pytest.mark.spec("TP-4", "MEM-3")
def test_closing_ends_the_ranks_and_twice_is_harmless(checkpoint: Path) -> None:
    llm = LLM(checkpoint, tensor_parallel_size=2, num_kvcache_blocks=50)
    numbers = pids(llm)
    llm.close()
    llm.close()
    assert wait_for_end(numbers, seconds=0)


@pytest.mark.spec("TP-4")
def test_an_engine_that_nobody_closes_ends_when_it_is_collected(checkpoint: Path) -> None:
    llm = LLM(checkpoint, tensor_parallel_size=2, num_kvcache_blocks=50)
    numbers = pids(llm)
    del llm
    gc.collect()
    assert wait_for_end(numbers, seconds=0)


@pytest.mark.spec("TP-4")
def test_two_engines_at_once(checkpoint: Path) -> None:
    """In one process, and their steps interleave."""
    options = {"tensor_parallel_size": 2, "num_kvcache_blocks": 50, "skip_tokenizer": True}
    with LLM(checkpoint, **options) as a, LLM(checkpoint, **options) as b:
        streams = [engine.stream(PROMPTS[0], GREEDY) for engine in (a, b)]
        pieces = list(zip(*streams, strict=True))
        assert len(pieces) == GREEDY.max_tokens
        assert all(one == other for one, other in pieces)
