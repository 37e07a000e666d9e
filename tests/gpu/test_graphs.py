"""CUDA graphs against the eager engine and HF transformers, on a small random model in float32."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_oracle import HFOracle
from rule_r1 import RuleR1
from tiny_models import make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.engine import cuda_runner
from nanovllm.engine.decode_graphs import unowned
from nanovllm.engine.model_runner import ModelRunner

MAX_NUM_SEQS = 255  # no multiple of anything that graphs are recorded for
MAX_MODEL_LEN = 512
MAX_TOKENS = 6
FP32_ERROR = 5e-5
NAN = float("nan")

Ids = list[int]


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        seed=1,
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
    )


@pytest.fixture(scope="module")
def prompts() -> list[Ids]:
    rng = random.Random(0)
    return [[rng.randrange(2000) for _ in range(rng.randint(1, 70))] for _ in range(MAX_NUM_SEQS)]


@contextmanager
def open_llm(checkpoint: Path, **options: Any) -> Iterator[LLM]:
    """An engine without a prefix cache, so that the same prompts are computed again."""
    defaults = {
        "skip_tokenizer": True,
        "dtype": "float32",
        "attention_backend": "triton",
        "max_num_seqs": MAX_NUM_SEQS,
        "num_kvcache_blocks": 2**12,
        "enable_prefix_caching": False,
    }
    with LLM(checkpoint, **defaults | options) as llm:
        llm.model_runner.kv_cache.fill_(NAN)
        yield llm


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with open_llm(checkpoint) as engine:
        yield engine


def run(llm: LLM, prompts: list[Ids], max_tokens: int = MAX_TOKENS) -> list[Ids]:
    outputs = llm.generate(prompts, greedy(max_tokens), use_tqdm=False)
    assert all(output.finish_reason == "length" for output in outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def rule(checkpoint: Path) -> RuleR1:
    oracle = HFOracle(checkpoint)
    return RuleR1(lambda ids: oracle.logits(ids)[-1], FP32_ERROR)


@pytest.fixture(scope="module")
def eager(checkpoint: Path, prompts: list[Ids], rule: RuleR1) -> list[Ids]:
    """Outputs of the engine without graphs, which are HF's."""
    with open_llm(checkpoint, enforce_eager=True) as engine:
        outputs = run(engine, prompts)
    theirs = HFOracle(checkpoint).greedy(prompts[:32], MAX_TOKENS)
    rule.compare(prompts[:32], outputs[:32], theirs).require_exercised()
    return outputs


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one item per replay of a graph."""
    seen: list[None] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        seen.append(None)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_unowned_tensor_is_the_same_memory(dtype: torch.dtype) -> None:
    """Also of logits that were cut, as those of an odd vocabulary on two ranks are."""
    whole = torch.arange(24, dtype=dtype, device="cuda").view(4, 6)
    for tensor in (whole, whole[:, :5], whole[1:, 2:]):
        other = unowned(tensor)
        assert torch.equal(other, tensor)
        tensor += 1
        assert torch.equal(other, tensor)


@pytest.mark.spec("GRF-1")
def test_every_batch_size_computes_what_eager_does(llm, prompts, eager, rule, replays) -> None:
    rng = random.Random(1)
    sizes = rng.sample(range(1, MAX_NUM_SEQS + 1), MAX_NUM_SEQS)
    compared = planned = 0
    for size in sizes:
        chosen = rng.sample(range(MAX_NUM_SEQS), size)
        before = len(replays)
        outputs = run(llm, [prompts[i] for i in chosen])
        assert len(replays) - before == MAX_TOKENS - 1, f"batch {size} decoded without graphs"
        found = rule.compare([prompts[i] for i in chosen], outputs, [eager[i] for i in chosen])
        compared, planned = compared + found.compared, planned + found.planned
    assert compared >= 0.9 * planned


@pytest.mark.spec("GRF-2", "KV-2")
@pytest.mark.parametrize("size", [1, 3, 17, 20, 65, 254])
def test_padding_rows_do_nothing_after_larger_batches(llm, prompts, eager, rule, size: int) -> None:
    """Blocks that a larger batch left are full of NaN, and its rows are still in the buffers."""
    run(llm, prompts)
    llm.model_runner.kv_cache.fill_(NAN)
    outputs = run(llm, prompts[:size])
    rule.compare(prompts[:size], outputs, eager[:size]).require_exercised()


@pytest.mark.spec("GRF-2", "KV-2")
def test_padding_rows_write_nothing(llm, prompts) -> None:
    """Of a cache full of NaN only the slots of the 17 requests are written, by 24 rows."""
    cache = llm.model_runner.kv_cache
    cache.fill_(NAN)
    outputs = run(llm, prompts[:17])
    written = (~cache[0, 0, ..., 0, 0].isnan()).sum().item()
    # The last token of a request is never computed.
    assert written == sum(len(p) + len(o) - 1 for p, o in zip(prompts, outputs, strict=False))


@pytest.mark.spec("GRF-3")
def test_the_longest_sequence_fits(llm, checkpoint, rule, replays) -> None:
    prompt = [i % 2000 for i in range(MAX_MODEL_LEN - 40)]
    others = [[7, i] for i in range(20)]
    with open_llm(checkpoint, enforce_eager=True) as engine:
        expected = run(engine, [prompt], max_tokens=40)
    before = len(replays)
    outputs = run(llm, [prompt, *others], max_tokens=40)
    assert len(replays) - before >= 39
    rule.compare([prompt], outputs[:1], expected).require_exercised()


@pytest.mark.spec("GRF-4")
def test_enforce_eager_records_and_replays_nothing(
    checkpoint, prompts, eager, rule, replays, monkeypatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a graph was recorded")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with open_llm(checkpoint, enforce_eager=True) as engine:
        outputs = run(engine, prompts[:17])
    assert not replays
    rule.compare(prompts[:17], outputs, eager[:17]).require_exercised()


@pytest.mark.spec("GRF-4")
def test_beyond_the_largest_graph_it_runs_eager(
    checkpoint, prompts, eager, rule, replays, monkeypatch
) -> None:
    monkeypatch.setattr(cuda_runner, "graph_batch_sizes", lambda max_batch: [1, 8])
    with open_llm(checkpoint) as engine:
        within = run(engine, prompts[:8])
        assert len(replays) == MAX_TOKENS - 1
        beyond = run(engine, prompts[:20])
        assert len(replays) == MAX_TOKENS - 1
    rule.compare(prompts[:8], within, eager[:8]).require_exercised()
    rule.compare(prompts[:20], beyond, eager[:20]).require_exercised()


@pytest.mark.spec("GRF-5", "KV-2")
def test_recording_leaves_no_trace(checkpoint, prompts, eager, rule, monkeypatch) -> None:
    """Nothing is written into a cache that is full of NaN from the start, nothing published."""
    new_kv_cache = ModelRunner._new_kv_cache
    monkeypatch.setattr(ModelRunner, "_new_kv_cache", lambda *args: new_kv_cache(*args).fill_(NAN))
    with LLM(
        checkpoint,
        skip_tokenizer=True,
        dtype="float32",
        max_num_seqs=MAX_NUM_SEQS,
        num_kvcache_blocks=2**12,
    ) as engine:
        assert engine.model_runner.kv_cache.isnan().all()
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_cached_blocks, stats.num_steps, stats.num_requests) == (0, 0, 0)
        outputs = run(engine, prompts[:20])
    rule.compare(prompts[:20], outputs, eager[:20]).require_exercised()
