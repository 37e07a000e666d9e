"""SiluAndMul against its formula."""

import pytest
import torch

from nanovllm.layers.activation import SiluAndMul


@pytest.mark.spec("MOD-1", "MOD-3")
def test_gates_come_first_and_the_input_is_left():
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    gate, up = x[:, :6].double(), x[:, 6:].double()
    torch.testing.assert_close(SiluAndMul()(x).double(), gate / (1 + (-gate).exp()) * up)
    assert torch.equal(x, before)
