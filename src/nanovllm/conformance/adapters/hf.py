"""HF transformers at the engine door: a model's own `generate`, one request at a time.

Runs in the engine's interpreter, which has torch and transformers. It is a subject like any other,
and the plainest one: no batch, no paged cache, nothing shared between requests.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers


class HuggingFace:
    """The engine door; see docs/protocol.md for its calls."""

    capabilities = (
        "greedy",
        "logprobs",
        "min_p",
        "min_tokens",
        "sampling",
        "seed",
        "top_k",
        "top_p",
    )

    def hello(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "version": transformers.__version__,
            "doors": ["engine"],
            "capabilities": self.capabilities,
        }

    def open(self, model: str, options: dict[str, Any]) -> None:
        """Of the options it takes `dtype` and `device`; the others are about caches and batches."""
        dtype = getattr(torch, options.get("dtype", "float32"))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model: Any = loaded.to(options.get("device", "cpu")).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
        eos = self.model.generation_config.eos_token_id
        eos = [] if eos is None else eos
        self.eos = set(eos if isinstance(eos, list) else [eos])

    def generate(self, requests: list[Any]) -> list[list[dict[str, Any]]]:
        return [[self.complete(request)] for request in requests]

    @torch.inference_mode()
    def complete(self, request: Any) -> dict[str, Any]:
        params, prompt = request.params, request.prompt
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        ends = set(params.get("stop_token_ids", ()))
        ends |= set() if params.get("ignore_eos") else self.eos
        if params.get("seed") is not None:
            torch.manual_seed(params["seed"])
        inputs = torch.tensor([ids], device=self.model.device)
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=self.config(params, ends),
        )
        tokens = output.sequences[0, len(ids) :].tolist()
        result = {
            "token_ids": tokens,
            "text": self.tokenizer.decode(tokens, skip_special_tokens=True),
            "finish_reason": "stop" if tokens[-1] in ends else "length",
        }
        if params.get("logprobs") is not None:
            result["logprobs"] = logprobs(output.logits, tokens, params["logprobs"])
        return result

    def config(self, params: dict[str, Any], ends: set[int]) -> Any:
        temperature = params.get("temperature", 1.0)
        drawn = {}
        if temperature > 0:
            drawn = {
                "temperature": temperature,
                "top_k": max(params.get("top_k", 0), 0),
                "top_p": params.get("top_p", 1.0),
                "min_p": params.get("min_p", 0.0),
            }
        return transformers.GenerationConfig(
            do_sample=temperature > 0,
            max_new_tokens=params.get("max_tokens", 64),
            min_new_tokens=params.get("min_tokens", 0),
            # An empty list is taken for "the model's own", an id that no token has is not.
            eos_token_id=sorted(ends) or [-1],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=params.get("logprobs") is not None,
            **drawn,
        )


def logprobs(
    logits: tuple[torch.Tensor, ...], tokens: list[int], count: int
) -> list[list[tuple[int, float]]]:
    """Per token, `(id, log probability)` of the token itself and of the `count` best."""
    rows = []
    for step, token in zip(logits, tokens, strict=True):
        row = torch.log_softmax(step[0].float(), dim=-1)
        best = row.topk(count)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows.append([(token, row[token].item()), *((i, p) for i, p in pairs if i != token)])
    return rows


def adapter() -> HuggingFace:
    return HuggingFace()
