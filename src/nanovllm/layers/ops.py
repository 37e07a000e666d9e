"""The operations of a model's layers as values, so that a backend can bring faster ones."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference

Tensor = torch.Tensor


class Ops(NamedTuple):
    """Each a kernel or its torch reference; none modifies its arguments (MOD-3)."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]


TORCH_OPS = Ops(rms_norm_reference, add_rms_norm_reference, silu_and_mul_reference, F.linear)
