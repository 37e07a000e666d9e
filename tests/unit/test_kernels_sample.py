"""The sampling kernel: the sampler's tokens, greedy rows, rows without a token."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_checks import (
    check_padding_is_greedy,
    check_sample,
    draw,
    random_rows,
)
from paged_rows import DEVICE
from threshold_checks import (
    check_sampling_threshold,
    check_threshold_of_few_values,
    check_threshold_of_hard_rows,
)

from nanovllm.kernels.gumbel_noise import gumbel_noise, row_keys, seed_streams, stream_keys
from nanovllm.kernels.sample import exponential, row_key
from nanovllm.layers.sampler import RowSampling, Sampler, SamplingInput
from nanovllm.sampling_params import SamplingParams


@pytest.mark.spec("SMP-1", "SMP-2", "SMP-4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [1, 48, 9001])
def test_tokens_are_the_references(vocab: int, dtype: torch.dtype) -> None:
    check_sample(vocab, [0.0, 0.6, 1.0, 1e30, 1e-44, 1.2e-38, 1e-5, 0.0], dtype, vocab + 5)


@pytest.mark.spec("SMP-3a", "SMP-3b", "SMP-3c")
@pytest.mark.parametrize(
    ("vocab", "dtype", "step"),
    [
        (1, torch.float32, 1.0),
        (50, torch.float16, 0.5),
        (300, torch.float32, 0.001),
        (5000, torch.float16, 0.125),
    ],
)
def test_thresholds_keep_what_the_reference_keeps(
    vocab: int, dtype: torch.dtype, step: float
) -> None:
    check_sampling_threshold(vocab, dtype, step)


@pytest.mark.spec("SMP-3a", "SMP-3b", "SMP-3c")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thresholds_of_rows_that_are_hard_to_search(dtype: torch.dtype) -> None:
    check_threshold_of_hard_rows(dtype)
    check_threshold_of_few_values(dtype, num_rows=6, vocab=150)


@pytest.mark.spec("SMP-1")
def test_padding_is_greedy() -> None:
    check_padding_is_greedy(torch.float32)


@pytest.mark.spec("SMP-4")
def test_tokens_are_the_samplers() -> None:
    rows = [
        RowSampling(SamplingParams(temperature=t), 2**63 + i, i)
        for i, t in enumerate([0.0, 0.5, 1.0, 1e-30, 2.0])
    ]
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(0))
    inp = SamplingInput.from_rows(rows)
    tokens = draw(
        logits.to(DEVICE),
        torch.from_numpy(inp.temperature).to(DEVICE),
        torch.from_numpy(seed_streams(inp.seed)).to(DEVICE),
        torch.from_numpy(inp.position).int().to(DEVICE),
    )
    assert tokens.tolist() == Sampler()(logits, inp).token_ids


@pytest.mark.spec("SMP-1")
def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, 9001, device=DEVICE)
    logits[0, [17, 300, 9000]] = 5.0
    logits[1, [8999, 9000]] = 1e-30
    tokens = draw(logits, torch.zeros(3, device=DEVICE), *random_rows(3))
    assert tokens.tolist() == [17, 8999, 0]


@pytest.mark.spec("SMP-2", "SMP-5")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_token_fail_alone(temperature: float) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.zeros(6, 5000, device=DEVICE)
    logits[0, 4999] = nan
    logits[1, 3] = inf
    logits[2] = -inf
    logits[3, 7], logits[3, 8], logits[3, 9] = nan, inf, -inf
    logits[4] = -inf
    logits[4, 4998] = -1e30
    logits[5, 10:] = -inf
    tokens = draw(logits, torch.full((6,), temperature, device=DEVICE), *random_rows(6)).tolist()
    assert tokens[:5] == [-1, -1, -1, -1, 4998]
    assert 0 <= tokens[5] < 10


@pytest.mark.spec("SMP-4")
def test_a_stream_is_its_seed() -> None:
    seed = np.array([0, 1, 2**64 - 1], np.uint64)
    position = np.array([0, 5, 2**40])
    assert np.array_equal(row_keys(seed, position), stream_keys(seed_streams(seed), position))


@triton.jit
def noise_kernel(streams, positions, out, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    token_id = tl.arange(0, BLOCK)
    key = row_key(tl.load(streams + row), tl.load(positions + row))
    tl.store(out + row * BLOCK + token_id, -tl.log(exponential(token_id, key)))


@pytest.mark.spec("SMP-4")
def test_the_noise_is_gumbel_noise() -> None:
    count = 2**14
    streams, positions = random_rows(8)
    out = torch.empty(8, count, device=DEVICE)
    noise_kernel[(8,)](streams, positions, out, count)
    keys = torch.from_numpy(stream_keys(streams.cpu().numpy(), positions.cpu().numpy()))
    torch.testing.assert_close(out.cpu(), gumbel_noise(keys, count), rtol=2e-6, atol=2e-6)
