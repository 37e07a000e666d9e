"""Rule R1 of the requirements: when two greedy outputs of one model count as equal.

Sums of floats depend on their order, so a batch, a chunk or a block size may turn a near tie. R1
lets two outputs part only there: at the first difference, after a common prefix, the oracle's
logits of both tokens lie within a tolerance of its largest. What follows is not compared, hence a
comparison that ended early shows little, and says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

MAX_TOLERANCE = 1e-4
REQUIRED_SHARE = 0.9

NextLogits = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens that were compared, of those planned, over a number of requests."""

    requests: int
    compared: int
    planned: int

    @property
    def share(self) -> float:
        return self.compared / max(self.planned, 1)

    def require_exercised(self) -> None:
        """AssertionError if less than 90 % of the planned tokens were compared."""
        assert self.share >= REQUIRED_SHARE, (
            f"not exercised: {self.compared} of {self.planned} planned tokens were compared, "
            f"{REQUIRED_SHARE:.0%} are needed"
        )


@dataclass(frozen=True, slots=True)
class RuleR1:
    """R1 for one model in float32.

    Args:
        next_logits: the oracle's logits [vocab_size] after a sequence of token ids.
        error: largest teacher-forced error of our logits on this model.
    """

    next_logits: NextLogits
    error: float

    @property
    def tolerance(self) -> float:
        return min(2 * self.error, MAX_TOLERANCE)

    def compare(
        self, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
    ) -> Comparison:
        """Compare outputs request by request; AssertionError at a difference that is no tie."""
        compared = [
            self._common(prompt, a, b) for prompt, a, b in zip(prompts, ours, theirs, strict=True)
        ]
        return Comparison(len(prompts), sum(compared), sum(map(len, theirs)))

    def _common(self, prompt: list[int], ours: list[int], theirs: list[int]) -> int:
        """Tokens before the first difference, after it has been judged."""
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                self._judge(prompt + theirs[:i], i, a, b)
                return i
        assert len(ours) == len(theirs), (
            f"prompt {prompt}: {len(ours)} tokens against {len(theirs)}, equal up to there"
        )
        return len(ours)

    def _judge(self, prefix: list[int], i: int, ours: int, theirs: int) -> None:
        logits = self.next_logits(prefix)
        below = (logits.max() - torch.minimum(logits[ours], logits[theirs])).item()
        assert below <= self.tolerance, (
            f"after {prefix} output {i} is {ours} against {theirs}; the oracle's logits are "
            f"{logits[ours]:.6f} and {logits[theirs]:.6f}, its largest is {logits.max():.6f}: "
            f"{below:.2e} apart, allowed are {self.tolerance:.2e}"
        )
