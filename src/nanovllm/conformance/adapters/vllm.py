"""vLLM at the engine door, through its offline class `LLM`.

Runs in the engine's interpreter, which has vllm; `import vllm` there means that package, since this
folder is not on the path.
"""

from __future__ import annotations

from typing import Any

import vllm

OPTIONS = {
    "kvcache_block_size": "block_size",
    "num_blocks": "num_gpu_blocks_override",
    "num_kvcache_blocks": "num_gpu_blocks_override",
    "prefix_cache": "enable_prefix_caching",
    "skip_tokenizer": "skip_tokenizer_init",
}
PARAMS = {"include_stop": "include_stop_str_in_output"}
"""vLLM's names where they differ from those of `nanovllm.LLM` and `nanovllm.SamplingParams`."""


def renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


class VLLM:
    """The engine door; see docs/protocol.md for its calls."""

    capabilities = (
        "greedy",
        "logprobs",
        "min_p",
        "min_tokens",
        "n",
        "penalties",
        "prefix_cache",
        "sampling",
        "seed",
        "stop",
        "top_k",
        "top_p",
    )

    def __init__(self) -> None:
        self.llm: Any = None

    def hello(self) -> dict[str, Any]:
        return {
            "engine": "vllm",
            "version": vllm.__version__,
            "doors": ["engine"],
            "capabilities": self.capabilities,
        }

    def open(self, model: str, options: dict[str, Any]) -> None:
        self.close()
        self.llm = vllm.LLM(model=model, **renamed(options, OPTIONS))

    def generate(self, requests: list[Any]) -> list[list[dict[str, Any]]]:
        prompts = [
            r.prompt if isinstance(r.prompt, str) else {"prompt_token_ids": list(r.prompt)}
            for r in requests
        ]
        params = [vllm.SamplingParams(**renamed(r.params, PARAMS)) for r in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [[self.result(output, sample) for sample in output.outputs] for output in outputs]

    def result(self, output: Any, sample: Any) -> dict[str, Any]:
        tokens = list(sample.token_ids)
        result = {
            "token_ids": tokens,
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "num_cached_tokens": output.num_cached_tokens,
        }
        if sample.logprobs is not None:
            result["logprobs"] = [
                [(token, row[token].logprob)]
                + [(other, row[other].logprob) for other in row if other != token]
                for token, row in zip(tokens, sample.logprobs, strict=True)
            ]
        return result

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """vLLM frees a model with the object that holds it."""
        self.llm = None


def adapter() -> VLLM:
    return VLLM()
