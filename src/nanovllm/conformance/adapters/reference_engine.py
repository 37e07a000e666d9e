"""The engine door of the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from nanovllm.conformance.protocol import (
    ENGINE_CAPABILITIES,
    EngineRequest,
    EngineResult,
    Hello,
    Refused,
)
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

OPTIONS = {
    "block_size": "kvcache_block_size",
    "num_blocks": "num_kvcache_blocks",
    "policy": "scheduling_policy",
    "prefix_cache": "enable_prefix_caching",
}
"""Names of the suite, and what `LLM` calls them."""


class ReferenceEngine:
    """The engine door; see `protocol.EngineDoor`.

    Args:
        llm_class: makes the engine from a model directory and options; `nanovllm.LLM` if None.
    """

    doors: tuple[str, ...] = ("engine",)
    capabilities: frozenset[str] = ENGINE_CAPABILITIES - {"graphs", "tp"}

    def __init__(self, llm_class: Callable[..., Any] | None = None) -> None:
        self.llm_class = llm_class
        self.llm: Any = None

    def hello(self) -> Hello:
        return Hello("reference", version("nanovllm"), self.doors, self.capabilities)

    def open(self, model: str, options: Mapping[str, Any]) -> None:
        """`model` empty is the embedded one."""
        if self.llm_class is None:
            # Late, so that the other two doors need no torch.
            from nanovllm.llm import LLM

            self.llm_class = LLM
        self.close()
        try:
            named = {OPTIONS.get(name, name): value for name, value in options.items()}
            self.llm = self.llm_class(model or None, **named)
        except ValueError as error:
            raise Refused(str(error)) from error

    def generate(self, requests: Sequence[EngineRequest]) -> list[list[EngineResult]]:
        try:
            params = [SamplingParams(**request.params) for request in requests]
            outputs = self.llm.generate([r.prompt for r in requests], params, use_tqdm=False)
        except ValueError as error:
            raise Refused(str(error)) from error
        return [_results(output) for output in outputs]

    def stream(self, request: EngineRequest, abort_after: int | None = None) -> list[str]:
        try:
            chunks = self.llm.stream([request.prompt], SamplingParams(**request.params))
        except ValueError as error:
            raise Refused(str(error)) from error
        pieces: list[str] = []
        for chunk in chunks:
            pieces.append(chunk.text)
            if len(pieces) == abort_after:
                chunks.close()
        return pieces

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        if self.llm is not None:
            self.llm.close()
            self.llm = None


def _results(output: RequestOutput) -> list[EngineResult]:
    return [
        EngineResult(
            token_ids=tuple(sample.token_ids),
            text=sample.text,
            finish_reason=sample.finish_reason,
            num_cached_tokens=output.num_cached_tokens,
            logprobs=tuple(map(tuple, sample.logprobs)) if sample.logprobs is not None else None,
        )
        for sample in output.samples
    ]
