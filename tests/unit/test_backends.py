"""Which attention backends there are, what they can, and what is said about what they cannot."""

import sys

import pytest
import torch

from nanovllm import LLM
from nanovllm.layers.backend import Needs
from nanovllm.layers.backends import select_backend
from nanovllm.layers.torch_attention import TorchBackend
from nanovllm.layers.triton_attention import TritonBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed; nothing of it is called."""
    module = type(sys)("flash_attn")
    module.flash_attn_varlen_func = module.flash_attn_with_kvcache = None
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.delitem(sys.modules, "nanovllm.layers.flash_attention", raising=False)


@pytest.mark.spec("CFG-2")
def test_auto_follows_the_device() -> None:
    assert select_backend("auto", CPU).name == "torch"
    assert select_backend("auto", CUDA).name == "triton"


@pytest.mark.spec("CFG-2")
def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, "nanovllm.layers.flash_attention", raising=False)
    with pytest.raises(ValueError, match=r"flash_attn.*pip install flash-attn.*'torch'"):
        select_backend("flash_attn", CUDA)


@pytest.mark.spec("CFG-2")
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((CPU, BF16, BF16, 256, 128), "needs a CUDA device, not cpu"),
        ((CUDA, FP32, FP32, 256, 128), "not torch.float32; 'triton' and 'torch'"),
        ((CUDA, BF16, FP8, 256, 128), "keeps keys and values in torch.bfloat16"),
        ((CUDA, BF16, BF16, 16, 128), "multiple of 256, got 16; 'triton' and 'torch' take any"),
        ((CUDA, BF16, BF16, 256, 260), "head_dim <= 256"),
    ],
)
def test_what_flash_attn_cannot(flash_attn: None, limits: tuple, message: str) -> None:
    backend = select_backend("flash_attn", CUDA)
    backend.check(Needs(CUDA, BF16, BF16, backend.default_block_size, 128))
    with pytest.raises(ValueError, match=message):
        backend.check(Needs(*limits))


@pytest.mark.spec("CFG-2")
def test_what_triton_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    TritonBackend().check(Needs(CUDA, FP32, FP8, 1, 256))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"\(8, 9\), this GPU has \(8, 0\); 'torch'"):
        TritonBackend().check(Needs(CUDA, FP32, FP8, 1, 256))
    with pytest.raises(ValueError, match="needs a CUDA device"):
        TritonBackend().check(Needs(CPU, FP32, FP32, 16, 64))
    with pytest.raises(ValueError, match="head_dim <= 256, got 512"):
        TritonBackend().check(Needs(CUDA, FP32, FP32, 16, 512))


@pytest.mark.spec("CFG-2")
def test_torch_can_all() -> None:
    TorchBackend().check(Needs(CPU, FP32, FP8, 1, 1024))


@pytest.mark.spec("CFG-2")
def test_an_engine_says_so(checkpoint) -> None:
    with pytest.raises(ValueError, match="'triton' needs a CUDA device"):
        LLM(checkpoint, attention_backend="triton", device="cpu")
    with pytest.raises(ValueError, match="attention_backend must be one of"):
        LLM(checkpoint, attention_backend="xformers")
