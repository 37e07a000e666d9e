"""nanovllm: an executable specification of LLM inference engines."""

from typing import TYPE_CHECKING, Any

from nanovllm.outputs import RequestOutput, StreamChunk
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "RequestOutput", "SamplingParams", "StreamChunk"]


def __getattr__(name: str) -> Any:
    # `nanovllm --help` should not wait seconds for torch and transformers.
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
