"""SMP: how a token is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.kernels.gumbel_noise import gumbel_noise, row_keys
from nanovllm.layers.logits_filters import filter_logits_, keep_min_p, keep_top_k, keep_top_p
from nanovllm.layers.logits_processors import (
    RepetitionPenalty,
    RowSampling,
    _presence_and_frequency,
    _repetition,
)
from nanovllm.layers.sampler import (
    Rows,
    Sampler,
    SamplerOutput,
    SamplingInput,
    TokenLogprob,
    _draw,
    _logprobs,
)

Tensor = torch.Tensor
Limits = npt.NDArray[Any]


def column(values: Limits) -> Tensor:
    return torch.from_numpy(values)[:, None]


# ---- greedy and sampled --------------------------------------------------------------------------


@planted("SMP-1", door="engine")
class GreedyRowsAmongOthersAreDrawn(SamplingInput):
    """A step with one sampled row draws for all of its rows."""

    @classmethod
    def from_rows(cls, rows: Sequence[RowSampling]) -> SamplingInput:
        inp = super().from_rows(rows)
        if not len(inp.sampled_rows):
            return inp
        return replace(inp, temperature=np.where(inp.temperature > 0, inp.temperature, 1))


def _drawn(z: Tensor, inp: SamplingInput, rows: Rows) -> Tensor:
    filter_logits_(z, inp.top_k[rows], inp.top_p[rows], inp.min_p[rows])
    noise = gumbel_noise(torch.from_numpy(row_keys(inp.seed[rows], inp.position[rows])), z.shape[1])
    return (z + noise).argmax(dim=-1, keepdim=True)


@planted("SMP-2", instead_of=_draw, door="engine")
def temperature_multiplies(scores: Tensor, peak: Tensor, inp: SamplingInput, rows: Rows) -> Tensor:
    """Logits are multiplied by the temperature."""
    return _drawn((scores - peak) * column(inp.temperature[rows]), inp, rows)


@planted("SMP-2", instead_of=_draw, door="engine")
def noise_before_temperature(
    scores: Tensor, peak: Tensor, inp: SamplingInput, rows: Rows
) -> Tensor:
    """Noise is added to the logits and then divided with them, so no temperature matters."""
    return _drawn(scores - peak, inp, rows)


# ---- filters -------------------------------------------------------------------------------------


@planted("SMP-3a", instead_of=keep_top_k, door="engine")
def top_k_keeps_one_less(z: Tensor, k: Limits) -> Tensor:
    """The k-th largest logit is compared with `<=`, so k = 1 alone is right."""
    return keep_top_k(z, np.maximum(k - 1, 1))


@planted("SMP-3b", instead_of=keep_top_p, door="engine")
def top_p_drops_the_crossing_token(z: Tensor, p: Limits) -> Tensor:
    """The set ends before the token that reaches p."""
    ordered, index = z.sort(dim=-1, descending=True, stable=True)
    beyond = ordered.softmax(dim=-1).cumsum(dim=-1) > column(p)
    beyond[:, 0] = False
    return torch.empty_like(z).scatter_(-1, index, ordered.masked_fill(beyond, -torch.inf))


@planted("SMP-3c", instead_of=keep_min_p, door="engine")
def min_p_is_a_probability(z: Tensor, p: Limits) -> Tensor:
    """min_p is compared with a token's probability, not with its share of the best one's."""
    best = z == z.amax(dim=-1, keepdim=True)
    return z.masked_fill((z.softmax(dim=-1) < column(p)) & ~best, -torch.inf)


# ---- seeds ---------------------------------------------------------------------------------------


@planted("SMP-4", instead_of=row_keys, door="engine")
def noise_of_the_batch_row(
    seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Noise depends on the row in the batch."""
    return row_keys(seed, position + 1000 * np.arange(len(position)))


@planted("SMP-4", instead_of=gumbel_noise, door="engine")
def noise_of_the_process(keys: Tensor, vocab_size: int) -> Tensor:
    """Noise comes from one generator for all, whatever a request's seed is."""
    return -torch.empty(len(keys), vocab_size).exponential_().log()


@planted("SMP-5", door="engine")
class NanFailsTheBatch(Sampler):
    """A row of NaN fails all rows of its step."""

    def forward(self, logits: Tensor, inp: SamplingInput) -> SamplerOutput:
        output = super().forward(logits, inp)
        failed = tuple(range(len(logits))) if output.failed else ()
        return replace(output, failed=failed)


# ---- log probabilities and penalties -------------------------------------------------------------


@planted("SMP-6", instead_of=_logprobs, door="engine")
def logprobs_of_half_precision(
    logits: Tensor, token_ids: list[int], wanted: Sequence[tuple[int, int]]
) -> list[list[TokenLogprob] | None]:
    """Log probabilities are those of logits that were rounded to bfloat16."""
    return _logprobs(logits.bfloat16().float(), token_ids, wanted)


@planted("SMP-7", instead_of=_repetition, door="engine")
def repetition_forgets_the_prompt(rows: Sequence[RowSampling]) -> list[Any]:
    """The repetition penalty covers the output alone."""
    return _repetition([row._replace(prompt_token_ids=()) for row in rows])


@planted("SMP-7", instead_of=_presence_and_frequency, door="engine")
def frequency_counts_the_prompt(rows: Sequence[RowSampling]) -> list[Any]:
    """Presence and frequency penalties cover the prompt too."""
    whole = [
        row._replace(output_token_ids=[*row.prompt_token_ids, *row.output_token_ids])
        for row in rows
    ]
    return _presence_and_frequency(whole)


@planted("SMP-7", door="engine")
class NegativeLogitsAreDividedToo(RepetitionPenalty):
    """The penalty divides negative logits as well, which makes their tokens likelier."""

    def _edited(self, logits: Tensor, values: Tensor) -> Tensor:
        return logits / values


FAULTS = plantings_in(globals())
