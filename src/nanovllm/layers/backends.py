"""The attention backends by name, and the choice of one."""

from importlib import import_module

import torch

from nanovllm.layers.backend import Backend
from nanovllm.layers.torch_attention import TorchBackend

OPTIONAL = {
    "triton": ("nanovllm.layers.triton_attention", "TritonBackend", "pip install triton"),
    "flash_attn": ("nanovllm.layers.flash_attention", "FlashBackend", "pip install flash-attn"),
}
"""Module, class and remedy of the backends that need a package beyond torch."""


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name; `auto` is `triton` on CUDA and `torch` elsewhere.

    Raises ValueError, saying what to do, if its package is not there.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return TorchBackend()
    module, class_name, remedy = OPTIONAL[name]
    try:
        backend: Backend = getattr(import_module(module), class_name)()
    except ImportError as error:
        raise ValueError(
            f"attention_backend={name!r} cannot be imported ({error}); {remedy}, or choose 'torch'"
        ) from error
    return backend
