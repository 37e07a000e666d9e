"""The host's share of a step: small, and independent of the size of the pool (PRF-2)."""

import statistics
from time import process_time

import pytest
from host_step import decoding_scheduler, host_step
from pytest_benchmark.fixture import BenchmarkFixture

NUM_SEQS = 256


@pytest.mark.spec("PRF-2")
def test_host_step_at_256_running(benchmark: BenchmarkFixture) -> None:
    """Reported in ms by pytest-benchmark; expect below 1."""
    scheduler = decoding_scheduler(NUM_SEQS, num_blocks=20_000)
    rows = benchmark.pedantic(host_step, (scheduler,), rounds=200, warmup_rounds=20)
    assert rows == NUM_SEQS


@pytest.mark.spec("PRF-2", "BLK-9")
def test_host_step_does_not_depend_on_the_pool() -> None:
    """Within 20 % between 1,000 and 100,000 blocks; interleaved, and the quietest rounds compared,
    since whatever else the machine does only ever adds time."""
    seconds: dict[int, list[float]] = {1_000: [], 100_000: []}
    for _ in range(5):
        for num_blocks, samples in seconds.items():
            scheduler = decoding_scheduler(NUM_SEQS, num_blocks)
            for _ in range(20):
                begin = process_time()
                assert host_step(scheduler) == NUM_SEQS
                samples.append(process_time() - begin)
    small, large = (statistics.quantiles(s, n=10)[0] for s in seconds.values())
    assert large < 1.2 * small, (
        f"{large * 1e3:.2f} ms at 100,000 blocks, {small * 1e3:.2f} at 1,000"
    )


@pytest.mark.spec("PRF-2")
def test_host_step_grows_linearly_in_running_requests() -> None:
    """Eight times the sequences cost at most ten times as much."""
    seconds: dict[int, list[float]] = {64: [], 512: []}
    for _ in range(5):
        for num_seqs, samples in seconds.items():
            scheduler = decoding_scheduler(num_seqs, num_blocks=4_000)
            for _ in range(20):
                begin = process_time()
                host_step(scheduler)
                samples.append(process_time() - begin)
    few, many = (statistics.quantiles(s, n=10)[0] for s in seconds.values())
    assert many < 10 * few, f"{many * 1e3:.2f} ms for 512 sequences, {few * 1e3:.2f} for 64"
