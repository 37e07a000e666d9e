"""Runs prompts through an engine door, and compares outputs by rule R1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.conformance.protocol import (
    EngineDoor,
    EngineFault,
    EngineRequest,
    EngineResult,
    Refused,
    Unsupported,
)
from nanovllm.conformance.verdicts import Evaluations, Violation

if TYPE_CHECKING:
    from nanovllm.conformance.scenarios.oracle_hf import HFOracle

MODEL = Path(__file__).parents[2] / "assets" / "tiny-qwen3"
REQUIRED_SHARE = 0.9
BASE = {"dtype": "float32", "block_size": 16, "num_blocks": 256}

Prompt = str | Sequence[int]

TEXTS: tuple[str, ...] = (
    "In the beginning God created the heaven and the earth.",
    "It is a truth universally acknowledged",
    "In the beginning God created the heaven and the sea, and all that is in it",
    "The lamb",
)
"""Prose that the model knows: its outputs have no near ties. Two share a beginning."""


class EngineBench:
    """An engine door with a model open behind it.

    Args:
        seen: counts what is put to the test.
        model: directory of the checkpoint.
        options: of `open`, beyond `BASE`.
    """

    def __init__(
        self, door: EngineDoor, seen: Evaluations, model: Path = MODEL, **options: Any
    ) -> None:
        self.door = door
        self.seen = seen
        self.model = model
        door.open(str(model), {**BASE, **options})

    def try_open(self, **options: Any) -> bool:
        """Open the model anew; False if the engine cannot take these options, as it may (CFG-2)."""
        try:
            self.door.open(str(self.model), {**BASE, **options})
        except (Refused, Unsupported):
            return False
        return True

    def generate(self, prompts: Sequence[Prompt], **params: Any) -> list[list[EngineResult]]:
        """All samples of each prompt, as one batch; `params` as of `SamplingParams`."""
        wanted = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **params}
        return self.submit([request(prompt, wanted) for prompt in prompts])

    def submit(self, requests: Sequence[EngineRequest]) -> list[list[EngineResult]]:
        """All samples of each; raises EngineFault if one ended by an error, as none here should."""
        results = self.door.generate(requests)
        for asked, samples in zip(requests, results, strict=True):
            if any(sample.finish_reason == "error" for sample in samples):
                raise EngineFault(f"{asked} ended by an error: {samples}")
        return results

    def ask(self, prompts: Sequence[Prompt], **params: Any) -> list[EngineResult]:
        """The first sample of each prompt, as one batch; greedy unless `params` say otherwise."""
        return [samples[0] for samples in self.generate(prompts, **params)]

    def ask_one(self, prompt: Prompt, **params: Any) -> EngineResult:
        return self.ask([prompt], **params)[0]

    def solo(self, prompts: Sequence[Prompt], **params: Any) -> list[EngineResult]:
        """Each prompt alone, one after the other."""
        return [self.ask_one(prompt, **params) for prompt in prompts]

    def expect(self, holds: object, spec_id: str, *message: object) -> None:
        self.seen.require(holds, spec_id, *message)

    @cached_property
    def oracle(self) -> HFOracle:
        # Late, since torch and transformers take seconds and most comparisons need neither.
        from nanovllm.conformance.scenarios.oracle_hf import HFOracle

        return HFOracle(self.model)

    def expect_equal(
        self,
        spec_id: str,
        prompts: Sequence[Prompt],
        ours: Sequence[EngineResult],
        theirs: Sequence[Sequence[int]],
        label: str,
    ) -> None:
        """Greedy outputs are equal by rule R1; counts if 90 % of the tokens could be compared."""
        compared = sum(
            self._common(spec_id, prompt, result.token_ids, tokens, label)
            for prompt, result, tokens in zip(prompts, ours, theirs, strict=True)
        )
        if compared >= REQUIRED_SHARE * sum(map(len, theirs)):
            self.seen.count(spec_id)

    def _common(
        self, spec_id: str, prompt: Prompt, ours: Sequence[int], theirs: Sequence[int], label: str
    ) -> int:
        """Tokens before the first difference, which must be a tie."""
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                gap = self.oracle.gap([*self.oracle.encode(prompt), *theirs[:i]], a, b)
                if gap > self.oracle.tolerance:
                    raise Violation(
                        spec_id,
                        f"{label}: output {i} of {prompt!r} is {a}, expected {b}, whose logits are "
                        f"no tie: {gap:.2e} below the oracle's largest, allowed are "
                        f"{self.oracle.tolerance:.2e}",
                    )
                return i
        if len(ours) != len(theirs):
            message = f"{label}: {len(ours)} outputs of {prompt!r}, expected {len(theirs)}"
            raise Violation(spec_id, message)
        return len(ours)

    def expect_refused(self, spec_id: str, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Refused:
            self.seen.count(spec_id)
        else:
            raise Violation(spec_id, f"{what} is not refused")


def request(prompt: Prompt, params: dict[str, Any]) -> EngineRequest:
    return EngineRequest(prompt if isinstance(prompt, str) else tuple(prompt), params)


def tokens_of(results: Sequence[EngineResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]
