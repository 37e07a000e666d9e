"""What the tests of kernels rely on in Triton's interpreter, which not every version has right."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from paged_rows import DEVICE


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(a + tile), tl.trans(tl.load(b + tile)), input_precision="ieee")
    tl.store(out + tile, product)


@triton.jit
def sum_kernel(x, bounds, out):
    total = 0.0
    for i in range(tl.load(bounds), tl.load(bounds + 1), 2):
        total += tl.load(x + i)
    tl.store(out, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dot_is_numpys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16, dtype=dtype, device=DEVICE)
    out = torch.empty(16, 16, device=DEVICE)
    dot_kernel[(1,)](a, b, out, 16)
    expected = a.double().cpu().numpy() @ b.double().cpu().numpy().T
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_bounds_of_a_loop_may_be_loaded() -> None:
    x = torch.arange(10.0, device=DEVICE)
    out = torch.empty(1, device=DEVICE)
    sum_kernel[(1,)](x, torch.tensor([3, 8], device=DEVICE), out)
    assert out.item() == 3 + 5 + 7
