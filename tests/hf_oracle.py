"""The oracle of every token: greedy decoding by HF transformers on a CPU in float32."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class HFOracle:
    """A checkpoint as HF transformers sees it, with its own attention and its own KV cache."""

    def __init__(self, path: str | Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits after each token of one sequence, computed without a cache: [T, vocab_size]."""
        ids = torch.tensor([token_ids])
        return self.model(ids, attention_mask=torch.ones_like(ids)).logits[0]

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The next `max_tokens` tokens of each prompt, end of sequence ignored."""
        return [row.tolist() for row in self._decode(prompts, max_tokens)]

    def _decode(self, prompts: list[list[int]], max_tokens: int) -> torch.Tensor:
        """One batch, padded on the left; the mask is explicit, since a prompt may hold any id."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, tokens = None, []
        for _ in range(max_tokens):
            out = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
            positions = positions[:, -1:] + 1
            tokens.append(ids)
        return torch.cat(tokens, dim=1)
