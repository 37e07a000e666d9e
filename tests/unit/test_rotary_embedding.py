"""RoPE against rotation by complex numbers in float64."""

import pytest
import torch

from nanovllm.kernels.rotary_embedding import apply_rotary_emb
from nanovllm.layers.rotary_embedding import RotaryEmbedding


def reference(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.size(-1) // 2
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None, None] * theta ** (-torch.arange(half).double() / half)
    turned = z * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.spec("MOD-4")
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("head_dim", [2, 16, 128])
def test_equals_complex_rotation(head_dim, theta):
    positions = torch.tensor([0, 1, 5, 63, 2, 499])
    x = heads(6, 3, head_dim)
    turned = apply_rotary_emb(x, *RotaryEmbedding(head_dim, 500, theta)(positions).angles)
    # float32 angles of up to 499 radians are 3e-5 off.
    torch.testing.assert_close(turned.double(), reference(x, positions, theta), atol=2e-4, rtol=0)


@pytest.mark.spec("MOD-4")
def test_scores_depend_on_the_distance_alone():
    q, k = heads(2, 1, 1, 16)
    rope = RotaryEmbedding(16, 100, 10_000.0)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        cos, sin = rope(torch.tensor([query_position, key_position])).angles
        turned_q = apply_rotary_emb(q, cos[:1], sin[:1])
        turned_k = apply_rotary_emb(k, cos[1:], sin[1:])
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(7, 3), score(97, 93), atol=1e-4, rtol=0)
    assert (score(7, 3) - score(3, 7)).abs() > 0.1


@pytest.mark.spec("MOD-3", "MOD-4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_in_float32_and_leaves_its_input(dtype):
    x = heads(4, 2, 16).to(dtype)
    before = x.clone()
    cos, sin = RotaryEmbedding(16, 100, 10_000.0)(torch.tensor([3, 1, 99, 50])).angles
    turned = apply_rotary_emb(x, cos, sin)
    assert turned.dtype == dtype
    assert torch.equal(turned, apply_rotary_emb(x.float(), cos, sin).to(dtype))
    assert torch.equal(x, before)


@pytest.mark.spec("MOD-4")
def test_the_table_is_float32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        low = RotaryEmbedding(16, 100, 10_000.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(low.cos_sin, RotaryEmbedding(16, 100, 10_000.0).cos_sin)
    assert not low.state_dict()
