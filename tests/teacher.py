"""HF transformers in float32, asked about outputs after they were generated.

One forward pass over a prompt and our own output gives HF's logits before each of our tokens. Up to
the first difference these are the logits of HF's own greedy run, so rule R1 is judged as usual;
after it the judgement goes on, each token given our own prefix.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from rule_r1 import Comparison
from transformers import AutoModelForCausalLM

MAX_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.75, "float16": 0.75}

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outputs of one run against HF's.

    Attributes:
        strict: R1 up to the first difference of each output.
        agreeing: tokens that are HF's choice given our prefix.
        largest_gap: how far below HF's best logit one of our tokens was.
    """

    strict: Comparison
    agreeing: int
    largest_gap: float

    @property
    def agreement(self) -> float:
        return self.agreeing / self.strict.planned


class Teacher:
    """One checkpoint. What was asked about an output once is remembered."""

    def __init__(
        self, path: Path, device: str = "cuda", dtype: torch.dtype = torch.float32
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        self.model = model.to(device).eval()
        self.device = device
        self._gaps: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, prompt: Ids, output: Ids) -> torch.Tensor:
        """Before each token of `output`: float32 [len(output), vocab_size]."""
        ids = torch.tensor([prompt + output[:-1]], device=self.device)
        return self.model(ids, logits_to_keep=len(output)).logits[0].float()

    def gaps(self, prompt: Ids, output: Ids) -> torch.Tensor:
        """How far each token's logit lies below the best one: [len(output)], 0 for the best."""
        key = (len(prompt), *prompt, *output)
        if key not in self._gaps:
            logits = self.logits(prompt, output)
            chosen = logits.gather(1, torch.tensor(output, device=self.device)[:, None])[:, 0]
            self._gaps[key] = (logits.amax(1) - chosen).cpu()
        return self._gaps[key]

    def judge(self, prompts: list[Ids], outputs: list[Ids], tolerance: float) -> Judgement:
        """AssertionError at a token that is no tie within `tolerance`."""
        common, agreeing, largest = [], 0, 0.0
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            gaps = self.gaps(prompt, output)
            worst = int(gaps.argmax())
            assert gaps[worst] <= tolerance, (
                f"prompt {i} of {len(prompt)} tokens: output {worst} is {output[worst]}, whose "
                f"logit is {gaps[worst]:.4g} below HF's best; allowed are {tolerance:.4g}"
            )
            differing = gaps.nonzero()[:, 0].tolist()
            common.append(differing[0] if differing else len(output))
            agreeing += len(output) - len(differing)
            largest = max(largest, gaps[worst].item())
        strict = Comparison(len(prompts), sum(common), sum(map(len, outputs)))
        return Judgement(strict, agreeing, largest)
