"""Which model runner an engine gets: by ranks, device and attention backend."""

import torch

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.backends import select_backend
from nanovllm.layers.parallel import TensorParallel
from nanovllm.models.model_config import ModelConfig


def make_runner(config: Config, model_config: ModelConfig) -> ModelRunner:
    """The runner of an engine.

    Raises ValueError if the device or the backend's package is not to be had.
    """
    if config.data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size} engines are made by `LLM` itself, "
            "not by a class derived from it"
        )
    if config.tensor_parallel_size == 1:
        return build_runner(config, model_config, resolve_device(config.device), TensorParallel())
    from nanovllm.engine.tensor_parallel.start import start_ranks

    return start_ranks(config, model_config)


def build_runner(
    config: Config, model_config: ModelConfig, device: torch.device, tp: TensorParallel
) -> ModelRunner:
    """The runner of one rank, which does not tell others what to do."""
    backend = select_backend(config.attention_backend, device)
    if not backend.captures:
        return ModelRunner(config, model_config, backend, device, tp)
    # It imports Triton's kernels, which a CPU does without.
    from nanovllm.engine.cuda_runner import CudaModelRunner

    return CudaModelRunner(config, model_config, backend, device, tp)


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA if there is a device. Raises ValueError for CUDA without one."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError("device='cuda' was asked for, but torch finds no CUDA device here")
    return torch.device("cuda" if found and name != "cpu" else "cpu")
