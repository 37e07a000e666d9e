"""nanovllm: an executable specification of LLM inference engines."""

from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput, StreamChunk
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams", "StreamChunk"]
