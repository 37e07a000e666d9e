"""Edits of single logits before sampling: penalties (SMP-7) and banned ids (STP-2).

A processor holds the edits of all rows of a step as flat arrays, so a step costs one gather and
one scatter per kind of edit, and nothing at all when no row asks for that kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.sampling_params import SamplingParams

RowEdits = tuple[int, npt.NDArray[Any], Any]
"""(row, its distinct tokens, one value for all of them or one value each)."""


class RowSampling(NamedTuple):
    """What the sampler has to know about one sampled position."""

    params: SamplingParams
    seed: int
    """64 bits, already chosen when the request had none."""
    position: int
    """Index of the token to draw, which is the number of tokens known."""
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    banned_token_ids: Collection[int] = ()
    """Never drawn at this position: eos and stop ids before min_tokens."""


@dataclass(frozen=True)
class LogitsProcessor(ABC):
    """M edits of single logits, no (row, token) twice."""

    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]

    @classmethod
    def of(cls, edits: Sequence[RowEdits]) -> Self:
        """The processor of one or more rows' edits."""
        sizes = [len(tokens) for _, tokens, _ in edits]
        return cls(
            rows=np.repeat(np.array([row for row, _, _ in edits]), sizes),
            tokens=np.concatenate([tokens for _, tokens, _ in edits]).astype(np.int64),
            values=np.concatenate(
                [np.full(len(tokens), value, np.float32) for _, tokens, value in edits]
            ),
        )

    def apply_(self, logits: torch.Tensor) -> None:
        """Edit fp32 logits [R, V] in place."""
        rows, tokens, values = (
            torch.from_numpy(a).to(logits.device) for a in (self.rows, self.tokens, self.values)
        )
        logits[rows, tokens] = self._edited(logits[rows, tokens], values)

    @abstractmethod
    def _edited(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """New values [M] of the logits [M]."""


class RepetitionPenalty(LogitsProcessor):
    """Divides positive logits and multiplies negative ones.

    Source: CTRL (Keskar et al., 2019), with the sign rule of HF transformers.
    """

    def _edited(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.where(logits > 0, logits / values, logits * values)


class LogitBias(LogitsProcessor):
    """Adds a value; minus infinity makes a token impossible.

    A NaN or +inf that the model put where a ban is becomes NaN and still fails its row (SMP-5).
    """

    def _edited(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return logits + values


def _repetition(rows: Sequence[RowSampling]) -> list[RowEdits]:
    return [
        (i, np.unique([*row.prompt_token_ids, *row.output_token_ids]), penalty)
        for i, row in enumerate(rows)
        if (penalty := row.params.repetition_penalty) != 1.0
    ]


def _presence_and_frequency(rows: Sequence[RowSampling]) -> list[RowEdits]:
    edits: list[RowEdits] = []
    for i, row in enumerate(rows):
        presence, frequency = row.params.presence_penalty, row.params.frequency_penalty
        if presence or frequency:
            tokens, counts = np.unique(row.output_token_ids, return_counts=True)
            edits.append((i, tokens, -(presence + frequency * counts)))
    return edits


def _bans(rows: Sequence[RowSampling]) -> list[RowEdits]:
    return [
        (i, np.unique([*row.banned_token_ids]), -np.inf)
        for i, row in enumerate(rows)
        if row.banned_token_ids
    ]


def build_processors(rows: Sequence[RowSampling]) -> tuple[LogitsProcessor, ...]:
    """The processors that a step needs, in their order of application; empty for plain rows."""
    found = (
        (RepetitionPenalty, _repetition(rows)),
        (LogitBias, _presence_and_frequency(rows)),
        (LogitBias, _bans(rows)),
    )
    return tuple(kind.of(edits) for kind, edits in found if edits)


def process_logits(logits: torch.Tensor, processors: Sequence[LogitsProcessor]) -> torch.Tensor:
    """Edited fp32 copy of logits [R, V]; `logits` themselves when there is nothing to edit."""
    if not processors:
        return logits
    edited = logits.to(torch.float32, copy=True)
    for processor in processors:
        processor.apply_(edited)
    return edited
