"""From logits to token ids: greedy and sampled rows of one batch, in one call.

Order: penalties and bans, temperature, top-k, top-p, min-p, then Gumbel-max (SMP-2, SMP-3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from nanovllm.kernels.gumbel_noise import gumbel_noise, row_keys
from nanovllm.layers.logits_filters import filter_logits_
from nanovllm.layers.logits_processors import (
    LogitsProcessor,
    RowSampling,
    build_processors,
    process_logits,
)

__all__ = ["RowSampling", "Sampler", "SamplerOutput", "SamplingInput"]

TokenLogprob = tuple[int, float]
Rows = npt.NDArray[np.int64]

_CHUNK_ELEMENTS = 2**20
"""Rows are drawn in chunks of about this many scores: bounds the sampler's memory (MEM-1)."""


@dataclass(frozen=True)
class SamplingInput:
    """Sampling of the R rows of a step, as arrays on the host."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    processors: tuple[LogitsProcessor, ...] = ()
    """Penalties and bans of the rows that have some."""
    logprobs: tuple[tuple[int, int], ...] = ()
    """(row, count of top tokens) of the rows that want log probabilities."""

    @classmethod
    def from_rows(cls, rows: Sequence[RowSampling]) -> "SamplingInput":
        """The input of a step whose logits row i belongs to `rows[i]`."""
        params = [row.params for row in rows]
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int64),
            top_p=np.array([p.top_p for p in params], np.float64),
            min_p=np.array([p.min_p for p in params], np.float64),
            seed=np.array([row.seed for row in rows], np.uint64),
            position=np.array([row.position for row in rows], np.int64),
            processors=build_processors(rows),
            logprobs=tuple((i, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None),
        )

    @property
    def sampled_rows(self) -> Rows:
        """Rows that are not greedy; a temperature below fp32's normal range is greedy."""
        return np.flatnonzero(self.temperature >= np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class SamplerOutput:
    """What was drawn for the R rows of a step."""

    token_ids: list[int]
    """-1 in failed rows."""
    failed: tuple[int, ...]
    """Rows without a token to draw: NaN or +inf logits, or nothing above -inf (SMP-5)."""
    logprobs: list[list[TokenLogprob] | None]
    """Where asked for: the token drawn, then the other top tokens, best first (SMP-6)."""


class Sampler(nn.Module):
    """Draws one token per row; stateless, and never modifies the logits it is given (MOD-3)."""

    def forward(self, logits: torch.Tensor, inp: SamplingInput) -> SamplerOutput:
        """Logits [R, V] in any floating dtype to R token ids; works in fp32."""
        if logits.dim() != 2 or len(logits) != len(inp.temperature):
            raise ValueError(f"logits {tuple(logits.shape)} for {len(inp.temperature)} rows")
        scores = process_logits(logits, inp.processors)
        best = scores.argmax(dim=-1, keepdim=True)
        peak = scores.gather(-1, best).float()
        for rows in _row_chunks(inp.sampled_rows, logits.shape[1]):
            index = _to(rows, logits)
            best[index] = _draw(scores[index].float(), peak[index], inp, rows)
        token_ids = best.masked_fill(~peak.isfinite(), -1).flatten().tolist()
        return SamplerOutput(
            token_ids=token_ids,
            failed=tuple(i for i, token_id in enumerate(token_ids) if token_id < 0),
            logprobs=_logprobs(logits, token_ids, inp.logprobs),
        )


def _draw(scores: torch.Tensor, peak: torch.Tensor, inp: SamplingInput, rows: Rows) -> torch.Tensor:
    """Token ids [r, 1] drawn from scores [r, V], which are overwritten, with maxima `peak` [r, 1].

    The maximum is subtracted before the division: at tiny temperatures everything but the best
    token goes to -inf, and nothing overflows to +inf or NaN (SMP-2).
    """
    z = scores.sub_(peak).div_(_to(inp.temperature[rows], scores)[:, None])
    filter_logits_(z, inp.top_k[rows], inp.top_p[rows], inp.min_p[rows])
    keys = _to(row_keys(inp.seed[rows], inp.position[rows]), scores)
    return z.add_(gumbel_noise(keys, z.shape[1])).argmax(dim=-1, keepdim=True)


def _logprobs(
    logits: torch.Tensor, token_ids: list[int], wanted: Sequence[tuple[int, int]]
) -> list[list[TokenLogprob] | None]:
    """log_softmax of the raw logits for the wanted (row, count) pairs, None elsewhere."""
    result: list[list[TokenLogprob] | None] = [None] * len(token_ids)
    counts = {row: count for row, count in wanted if token_ids[row] >= 0}
    for rows in _row_chunks(np.array([*counts], np.int64), logits.shape[1]):
        values = logits[_to(rows, logits)].float().log_softmax(dim=-1)
        deepest = min(max(counts[row] for row in rows), logits.shape[1])
        top_values, top_ids = (t.tolist() for t in values.topk(deepest, dim=-1))
        drawn = values.gather(-1, _to(np.array([[token_ids[r]] for r in rows]), logits)).tolist()
        for i, row in enumerate(rows):
            top = list(zip(top_ids[i], top_values[i], strict=True))[: counts[row]]
            others = [pair for pair in top if pair[0] != token_ids[row]]
            result[row] = [(token_ids[row], drawn[i][0]), *others]
    return result


def _row_chunks(rows: Rows, width: int) -> Iterator[Rows]:
    step = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _to(array: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)
