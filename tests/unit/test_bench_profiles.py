"""Profiles on a tiny engine: what is counted must be what was done."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.bench import profiles
from nanovllm.bench.kernels import Kernel, device_kernels, run_kernels
from nanovllm.bench.prefill import PrefillRun, run_prefill
from nanovllm.bench.profiles import WARM_UP_STEPS, run_latency, run_online, run_throughput, warm_up
from nanovllm.bench.recorder import Recorder
from nanovllm.bench.roofline import DeviceRates, ModelCosts, floor_seconds
from nanovllm.bench.workload import Workload, offline_workload

VOCAB_SIZE = 300
RATES = DeviceRates(copy=1e9, matmul=1e9)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, skip_tokenizer=True, num_kvcache_blocks=64, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def work() -> Workload:
    return offline_workload(0, num_requests=6, max_len=20, vocab_size=VOCAB_SIZE)


def num_decode_context(work: Workload) -> int:
    """Positions that all decode steps attend to if nothing is computed twice."""
    return sum(
        sum(len(prompt) + i for i in range(1, count))
        for prompt, count in zip(work.prompts, work.max_tokens, strict=True)
    )


@pytest.mark.spec("PRF-1", "API-5")
def test_throughput_counts_every_token_and_context(llm: LLM, work: Workload) -> None:
    run = run_throughput(llm, work, seed=0, rates=RATES)
    assert run.num_output_tokens == work.num_output_tokens
    assert run.tokens_per_second == work.num_output_tokens / run.seconds
    records = run.records
    decodes = [record for record in records if record.kind == "decode"]
    assert sum(r.num_prefill_tokens for r in records) == work.num_prompt_tokens
    assert sum(r.num_decode_tokens for r in records) == work.num_output_tokens - 6
    assert sum(r.num_context_tokens for r in decodes) == num_decode_context(work)
    assert run.floor_seconds == floor_seconds(records, ModelCosts.of(llm), RATES)
    assert run.roofline_share == run.floor_seconds / run.seconds
    busy = sum(record.device_seconds for record in run.records)
    assert 0 < busy < run.seconds
    assert run.exposed_seconds == run.seconds - busy
    assert [r.end for r in records] == sorted(r.end for r in records)
    assert 0 < sum(r.seconds for r in records) <= run.seconds
    assert records[-1].num_running == records[-1].num_used_blocks == 0
    assert max(r.num_running for r in records) == 6


@pytest.mark.spec("PRF-1", "API-5")
def test_steps_split_into_device_and_exposed_host(llm: LLM, work: Workload) -> None:
    for record in run_throughput(llm, work, seed=0).records:
        assert 0 < record.device_seconds <= record.seconds
        assert record.exposed_seconds == record.seconds - record.device_seconds


@pytest.mark.spec("PRF-1", "SCH-8")
def test_the_roofline_holds_for_a_pool_that_preempts(checkpoint: Path, work: Workload) -> None:
    pool = {"num_kvcache_blocks": 5, "kvcache_block_size": 8}
    with LLM(checkpoint, skip_tokenizer=True, **pool) as llm:
        run = run_throughput(llm, work, seed=0, rates=RATES)
    assert run.num_preemptions == sum(r.num_preempted for r in run.records) > 0
    assert sum(r.num_prefill_tokens for r in run.records) > work.num_prompt_tokens
    assert run.roofline_share > 0


@pytest.mark.spec("PRF-1")
def test_a_run_that_loses_a_request_has_no_figures(
    llm: LLM, work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.step

    def cut_short():
        llm.abort_request(0)
        for request_id in range(10_000):
            llm.abort_request(request_id)
        return step()

    monkeypatch.setattr(llm, "step", cut_short)
    with pytest.raises(RuntimeError, match="ended early"):
        run_throughput(llm, work, seed=0)


def test_latency_times_full_batches_after_warm_up(llm: LLM) -> None:
    rates = DeviceRates(copy=1e9, matmul=1e18)
    run = run_latency(llm, batch_size=2, prompt_len=9, steps=5, rates=rates)
    costs, first = ModelCosts.of(llm), 9 + 1 + WARM_UP_STEPS
    read = [costs.weight_bytes + costs.kv_bytes * 2 * (first + i) for i in range(5)]
    assert run.floor_seconds == pytest.approx(sum(read) / 1e9)
    assert run.roofline_share == pytest.approx(1e3 * run.floor_seconds / sum(run.step_ms))
    assert run.batch_size == 2
    assert len(run.step_ms) == 5
    assert 0 < min(run.step_ms) <= run.median_ms <= max(run.step_ms)


@pytest.mark.spec("API-5")
def test_online_times_every_request(llm: LLM, work: Workload) -> None:
    run = run_online(llm, work, seed=0, rate=200.0)
    assert run.policy == "prefill_first"
    assert len(run.ttft) == run.num_requests == 6
    assert len(run.tpot) == sum(count > 1 for count in work.max_tokens)
    assert min(run.ttft) > 0
    assert min(run.tpot) > 0
    assert max(run.ttft) < run.seconds
    figures = run.milliseconds()
    assert list(figures) == ["ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"]
    assert figures["ttft_p50"] <= figures["ttft_p99"] == 1e3 * max(run.ttft)


@pytest.mark.spec("API-5")
def test_an_idle_engine_waits_for_the_next_arrival(
    llm: LLM, work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = [0.0, 0.1, 0.1, 0.2, 0.2, 0.3]
    monkeypatch.setattr(profiles, "poisson_arrivals", lambda seed, rate, count: due)
    run = run_online(llm, work, seed=0, rate=1.0)
    assert sum(r.num_prefill_tokens for r in run.records) == work.num_prompt_tokens
    assert run.records[-1].end >= 0.3
    assert min(run.ttft) > 0


def test_warming_up_leaves_no_prefix_behind(llm: LLM) -> None:
    warm_up(llm, max_len=20)
    stats = llm.stats()
    assert (stats.num_cached_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_a_recorder_counts_hits_from_its_own_start(llm: LLM) -> None:
    prompt = list(range(40))
    one = SamplingParams(max_tokens=1)
    llm.generate(prompt, one, use_tqdm=False)
    recorder = Recorder(llm)
    llm.add_request(prompt, one)
    recorder.run()
    last = recorder.records[-1]
    assert (last.num_lookup_tokens, last.num_cached_tokens) == (40, 32)


def test_a_kernel_that_waits_for_another_takes_no_time() -> None:
    """One that is launched early, one whose predecessor outlasts it, and a gap."""

    def event(name: str, start: float, end: float, device: str = "CUDA") -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name=device))

    events = [
        event("second", 4, 16),
        event("first", 0, 10),
        event("inside", 5, 8),
        event("first", 20, 24),
        event("launch", 0, 100, "CPU"),
    ]
    steps = 8
    found = device_kernels(SimpleNamespace(events=lambda: events), steps)
    times = {kernel.name: (kernel.count, kernel.us) for kernel in found}
    assert times == {
        "first": (2 / steps, 14 / steps),
        "second": (1 / steps, 6 / steps),
        "inside": (1 / steps, 0),
    }


@pytest.mark.spec("PRF-1")
@pytest.mark.parametrize(
    "profile",
    [
        lambda llm, work: run_throughput(llm, work, 0),
        lambda llm, work: run_latency(llm, 3, prompt_len=40, steps=2),
        lambda llm, work: run_online(llm, work, 0, rate=1e6),
        lambda llm, work: run_kernels(llm, 3, prompt_len=40),
        lambda llm, work: run_prefill(llm, num_prompts=3, prompt_len=40),
    ],
    ids=["throughput", "latency", "online", "kernels", "prefill"],
)
def test_profiles_find_nothing_cached_that_ran_before(
    profile: Callable[[LLM, Workload], object], llm: LLM, work: Workload
) -> None:
    """Prompts of a seed are the same in every run, and those of other lengths begin like them."""
    profile(llm, work)
    before = llm.stats()
    profile(llm, work)
    assert llm.stats().num_cached_tokens == before.num_cached_tokens


@pytest.mark.spec("PRF-1")
@pytest.mark.parametrize("batch_size", [9, 12])
@pytest.mark.parametrize("prompt_len", [2, 40])
def test_a_batch_that_has_no_room_is_refused(llm: LLM, batch_size: int, prompt_len: int) -> None:
    """There are 8 seats; the engine can go on."""
    with pytest.raises(ValueError, match=f"{batch_size} requests .*max_num_seqs=8"):
        run_latency(llm, batch_size, prompt_len, steps=2)
    with pytest.raises(ValueError, match=f"{batch_size} requests .*max_num_seqs=8"):
        run_kernels(llm, batch_size, prompt_len)
    assert llm.is_finished()


@pytest.mark.spec("PRF-1")
def test_a_prefill_computes_every_prompt_once(llm: LLM) -> None:
    """Products with weights are counted by the parameters, those of attention by the pairs."""
    before = llm.stats()
    run = run_prefill(llm, num_prompts=3, prompt_len=10)
    after = llm.stats()
    assert after.num_cached_tokens == before.num_cached_tokens, "prompts that share nothing"
    model = llm.model_config
    products = {kernel.name: kernel.count for kernel in run.kernels}["aten::mm"]
    steps = (products - 1) / (4 * model.num_hidden_layers)
    assert steps == 1, "all prompts at once, a third of what was profiled"
    q, kv = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    layer = model.hidden_size * (2 * q + 2 * kv + 3 * model.intermediate_size)
    head = model.hidden_size * model.vocab_size
    weights = 2 * (30 * layer * model.num_hidden_layers + 3 * head)
    assert weights <= run.flops <= 1.02 * weights, "norms are parameters too"
    assert run.attention_flops == 4 * 3 * 55 * q * model.num_hidden_layers


def test_the_share_of_a_matmul_rate() -> None:
    run = PrefillRun(
        1, 1, flops=600, attention_flops=200, kernels=[Kernel("a", 1, 2), Kernel("b", 1, 3)]
    )
    rates = DeviceRates(copy=1.0, matmul=200e6)
    assert run.matmul_share(rates) == pytest.approx(0.8)
    assert run.matmul_share(rates, attention=False) == pytest.approx(0.6)
