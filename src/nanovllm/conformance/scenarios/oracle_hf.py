"""HF transformers as the oracle of every token: greedy decoding and logits on a CPU in float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


class HFOracle:
    """A checkpoint as HF transformers sees it.

    Args:
        path: its directory.
        dtype: of the engine under test; rule R1 gives coarser numbers a wider tolerance.
    """

    def __init__(self, path: str | Path, dtype: str = "float32") -> None:
        logging.disable_progress_bar()
        self.path = path
        self.tolerance = 1e-4 if dtype == "float32" else 0.75
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.path)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        return list(prompt)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token of one sequence, computed without a cache: [T, vocab_size]."""
        ids = torch.tensor([list(token_ids)])
        logits: torch.Tensor = self.model(ids, attention_mask=torch.ones_like(ids)).logits[0]
        return logits

    def log_probs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """log_softmax of the raw logits after the last token: [vocab_size]."""
        return self.logits(token_ids)[-1].log_softmax(-1)

    def gap(self, token_ids: Sequence[int], *candidates: int) -> float:
        """How far the worst candidate's logit lies below the largest, after these tokens."""
        logits = self.logits(token_ids)[-1]
        return float(logits.max() - logits[list(candidates)].min())

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The next `max_tokens` tokens, end of sequence ignored."""
        ids, cache, tokens = torch.tensor([list(prompt)]), None, []
        for _ in range(max_tokens):
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
        return tokens
