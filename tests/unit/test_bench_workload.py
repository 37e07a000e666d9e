"""The benchmark's requests and its roofline: numbers that can be checked by hand."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM
from nanovllm.bench.recorder import StepRecord, percentile
from nanovllm.bench.roofline import (
    DeviceRates,
    ModelCosts,
    floor_seconds,
    measure_rates,
    step_floor,
)
from nanovllm.bench.workload import Workload, offline_workload, poisson_arrivals
from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM

DECODE = StepRecord(
    end=1.0,
    seconds=0.01,
    device_seconds=0.008,
    kind="decode",
    num_rows=2,
    num_prefill_tokens=0,
    num_decode_tokens=2,
    num_context_tokens=100,
    num_preempted=0,
    num_waiting=0,
    num_running=2,
    num_used_blocks=8,
    num_blocks=10,
    num_lookup_tokens=0,
    num_cached_tokens=0,
)
PREFILL = replace(
    DECODE, kind="prefill", num_prefill_tokens=100, num_decode_tokens=0, num_context_tokens=100
)
COSTS = ModelCosts(weight_bytes=1000, kv_bytes=10, token_flops=500, head_flops=100)
# Memory and arithmetic of 2 decoded tokens take 2 s and 1.2 s, of 100 prefilled ones 2 s and 50 s.
RATES = DeviceRates(copy=1000.0, matmul=1000.0)


@pytest.mark.spec("PRF-1")
def test_the_workload_is_nano_vllms() -> None:
    random.seed(7)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in "ab"]
    lengths = [random.randint(100, 1024) for _ in "ab"]
    assert offline_workload(7, num_requests=2) == Workload(tuple(prompts), tuple(lengths))


@pytest.mark.spec("PRF-1")
def test_its_totals_are_those_that_others_publish() -> None:
    work = offline_workload(0)
    assert (work.num_prompt_tokens, work.num_output_tokens) == (142_827, 133_966)


@pytest.mark.spec("PRF-1")
def test_a_small_workload_stays_within_its_bounds() -> None:
    work = offline_workload(0, num_requests=50, max_len=24, vocab_size=30)
    assert max(map(len, work.prompts)) == max(work.max_tokens) == 24
    assert min(map(len, work.prompts)) == min(work.max_tokens) == 1
    assert {token for prompt in work.prompts for token in prompt} == set(range(30))


def test_arrivals_are_poisson() -> None:
    arrivals = poisson_arrivals(0, rate=4.0, count=4000)
    gaps = torch.tensor(arrivals).diff(prepend=torch.zeros(1))
    assert gaps.min() > 0
    # Exponential: mean and standard deviation are 1 / rate.
    assert gaps.mean().item() == pytest.approx(0.25, rel=0.05)
    assert gaps.std().item() == pytest.approx(0.25, rel=0.05)
    with pytest.raises(ValueError, match="got 0"):
        poisson_arrivals(0, rate=0, count=1)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    shares = {0.0: 1, 0.01: 1, 0.5: 50, 0.501: 51, 0.99: 99, 1.0: 100}
    assert {share: percentile(values[::-1], share) for share in shares} == shares
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.spec("PRF-1")
def test_a_step_takes_as_long_as_the_slower_of_memory_and_arithmetic() -> None:
    assert step_floor(DECODE, COSTS, RATES) == 2.0
    assert step_floor(PREFILL, COSTS, RATES) == 50.0
    assert floor_seconds([DECODE, PREFILL, DECODE], COSTS, RATES) == 54.0


@pytest.mark.spec("PRF-1")
def test_an_engine_that_does_not_tell_contexts_has_no_roofline() -> None:
    with pytest.raises(ValueError, match="num_context_tokens"):
        step_floor(replace(DECODE, num_context_tokens=0), COSTS, RATES)


@pytest.mark.spec("PRF-1")
@pytest.mark.parametrize("tied", [True, False])
def test_costs_count_each_byte_once(tmp_path, tied: bool) -> None:
    from tiny_models import make_checkpoint

    path = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    with LLM(path, skip_tokenizer=True, num_kvcache_blocks=4) as llm:
        costs = ModelCosts.of(llm)
    # Two layers of 64 hidden, 4 heads and 2 KV heads of 16, an MLP of 128; norms beside them.
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    head = 300 * 64
    assert costs == ModelCosts(
        weight_bytes=4 * (2 * layer + 64 + head),
        kv_bytes=4 * 2 * 2 * 2 * 16,
        token_flops=2 * (2 * layer + 64),
        head_flops=2 * head,
    )


@pytest.mark.spec("PRF-1")
@pytest.mark.parametrize("tied", [True, False])
def test_costs_are_those_of_one_rank(tmp_path, tied: bool) -> None:
    """Half of all but norms, for each of two; 301 ids are padded to 302."""
    from tiny_models import make_checkpoint

    sizes = {"tie_word_embeddings": tied, "vocab_size": 301, "num_hidden_layers": 3}
    config = ModelConfig.from_pretrained(make_checkpoint(tmp_path, **sizes))
    runner = SimpleNamespace(block_bytes=64, block_size=4, dtype=torch.float32)
    llm = SimpleNamespace(model_config=config, model_runner=runner)
    costs = []
    for size in (1, 2):
        runner.model = Qwen3ForCausalLM(config, TensorParallel(0, size))
        costs.append(ModelCosts.of(llm))
    norms = 2 * (64 + 3 * (2 * 64 + 2 * 16))
    assert costs[1].head_flops == 2 * 151 * 64
    assert costs[1].token_flops - norms == (costs[0].token_flops - norms) / 2


@pytest.mark.spec("PRF-1")
def test_the_roofline_of_the_workload_on_an_h200() -> None:
    """docs/performance.md: 13.85 TB of keys and values, 3.5 s of decoding at 4.3 TB/s."""
    work = offline_workload(0)
    costs = ModelCosts(1_192_099_840, 114_688, 2 * 440_467_456, 2 * 155_582_464)
    records = []
    # The prefill brings the first token; step i computes the i-th of each that has more to come.
    for i in range(1, max(work.max_tokens)):
        contexts = [
            len(prompt) + i
            for prompt, count in zip(work.prompts, work.max_tokens, strict=True)
            if count > i
        ]
        rows = len(contexts)
        records.append(
            replace(DECODE, num_rows=rows, num_decode_tokens=rows, num_context_tokens=sum(contexts))
        )
    moved = sum(record.num_context_tokens for record in records) * costs.kv_bytes
    assert moved / 1e12 == pytest.approx(13.85, abs=0.02)
    seconds = floor_seconds(records, costs, DeviceRates(copy=4.3e12, matmul=700e12))
    assert seconds == pytest.approx(3.5, abs=0.05)


@pytest.mark.spec("PRF-1")
def test_rates_are_measured() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32, copy_bytes=1 << 20, matmul_size=64)
    assert 1e7 < rates.copy < 1e13
    assert 1e6 < rates.matmul < 1e14
