"""RMSNorm, plain and fused with the residual's addition."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm.layers.layernorm import RMSNorm

EPS = 1e-6


def build(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, EPS).to(dtype)
    weight = 1 + 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    norm.weight.weight_loader(norm.weight, weight)
    return norm


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.spec("MOD-4")
@pytest.mark.parametrize("shape", [(5, 32), (5, 4, 32)])
def test_equals_the_formula_in_float64(shape):
    x, norm = randn(*shape), build(32, torch.float32)
    x64 = x.double()
    expected = x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.spec("MOD-4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_where_transformers_does(dtype):
    x, norm = randn(64, 32).to(dtype), build(32, dtype)
    theirs = Qwen3RMSNorm(32, EPS).to(dtype)
    theirs.weight.data.copy_(norm.weight)
    assert torch.equal(norm(x), theirs(x))


@pytest.mark.spec("MOD-4")
def test_squares_beyond_the_range_of_float16():
    x = torch.full((1, 32), 3000.0, dtype=torch.float16)
    norm = build(32, torch.float16)
    torch.testing.assert_close(norm(x), norm.weight.unsqueeze(0))


@pytest.mark.spec("MOD-3", "MOD-4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_add_returns_the_true_sum_and_leaves_its_inputs(dtype):
    norm = build(32, dtype)
    x, residual = randn(64, 32).to(dtype), randn(64, 32, seed=2).to(dtype)
    before = x.clone(), residual.clone()
    normalised, total = norm(x, residual)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(normalised, norm(total))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.spec("MOD-3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_norm_leaves_its_input(dtype):
    x = randn(8, 32).to(dtype)
    before = x.clone()
    build(32, dtype)(x)
    assert torch.equal(x, before)
