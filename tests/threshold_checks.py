"""Which tokens top-k, top-p and min-p keep, by the kernel and by its reference."""

from collections.abc import Callable

import torch
from paged_rows import DEVICE

from nanovllm.kernels.sampling_threshold import sampling_threshold, sampling_threshold_reference

FILTERS = [
    # temperature, top_k, top_p, min_p
    (0.7, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.0, 10**6, 1.0, 0.0),
    (0.6, 0, 0.9, 0.0),
    (1.5, 0, 0.3, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.99999, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.6, 20, 0.95, 0.0),
    (2.0, 40, 0.8, 0.2),
    (1.0, 7, 0.9, 1e-9),
    (0.0, 3, 0.5, 0.5),
]


def kept_tokens(
    logits: torch.Tensor, rows: torch.Tensor, find: Callable[..., None]
) -> torch.Tensor:
    """Which tokens `find` keeps, bool [B, V], of rows `[temperature, top_k, top_p, min_p]`."""
    count = len(logits)
    seats = torch.arange(count, dtype=torch.int32, device=DEVICE)
    temperature, top_k, top_p, min_p = rows.to(DEVICE).t().contiguous()
    thresholds = torch.zeros(count, device=DEVICE)
    last_ids = torch.full_like(seats, -7)
    find(logits, temperature, top_k.int(), top_p, min_p, seats, thresholds, last_ids)
    ids = torch.arange(logits.shape[1], device=DEVICE)
    x, limit = logits.float(), thresholds[:, None]
    return (x > limit) | ((x == limit) & (ids <= last_ids[:, None]))


def check_sampling_threshold(vocab: int, dtype: torch.dtype, step: float) -> None:
    """`step`: logits are multiples of it, so that there are ties.

    Where a token begins within rounding of top-p's share, both answers are right.
    """
    torch.manual_seed(vocab)
    rows = torch.tensor(FILTERS)
    logits = (3 * torch.randn(len(rows), vocab, device=DEVICE) / step).round() * step
    logits[:, ::7] = -torch.inf
    logits[:, 0] = -0.0
    logits = logits.to(dtype)
    found, expected = (
        kept_tokens(logits, rows, find)
        for find in (sampling_threshold, sampling_threshold_reference)
    )
    drawable = logits > -torch.inf
    for i, (temperature, _, top_p, _) in enumerate(FILTERS):
        differ = (found[i] != expected[i]) & drawable[i]
        if not differ.any():
            continue
        assert top_p < 1, FILTERS[i]
        share = (logits[i].double() / temperature).softmax(0)
        unsure = 1e-5 * share[expected[i]].sum()
        assert share[differ].sum() < unsure + share[differ].max(), FILTERS[i]


def hard_rows() -> list[tuple[torch.Tensor, list[float], int]]:
    """Logits that a search may end beside, filters, and how many tokens are kept; all of their
    values are exact in every dtype, and no answer hangs on a rounding.
    """
    half = [1.0, 0, 0.505, 0.0]
    rows = [
        (torch.full((100,), value), half, 51) for value in (-1.0, -0.0, 0.0, 1.0, 3.0, 5.0, 20.0)
    ]
    rows.append((torch.tensor([20, 19.875, 19.75, 19.625, 0, 0]), [0.1, 0, 0.7, 0.0], 1))
    rows.append((torch.tensor([-0.0, -8.0]).repeat(50), [1.0, 0, 0.9, 0.0], 46))
    rows.append((torch.tensor([2.0, -torch.inf]).repeat(50), [1e30, 0, 0.505, 0.0], 26))
    rows.append((torch.full((9,), 2.0), [1.0, 0, 1.0, 1 - 2**-24], 9))
    # The best logits of a part of the row hide others of it.
    wide = torch.full((4 * 4096,), 0.5)
    wide[0], wide[4096], wide[8192] = 5.0, 3.671875, 3.65625
    rows.append((wide, [1.0, 2, 1.0, 0.0], 2))
    wide = torch.full((4 * 4096,), -4.0)
    wide[0], wide[4096], wide[8192] = 20.0, 20.0, 19.875
    rows.append((wide, [1.0, 2, 1.0, 0.0], 2))
    return rows


def check_threshold_of_hard_rows(dtype: torch.dtype) -> None:
    for logits, filters, count in hard_rows():
        row = logits.to(DEVICE, dtype)[None]
        kept = kept_tokens(row, torch.tensor([filters]), sampling_threshold)
        assert kept.logical_and(row > -torch.inf).sum() == count, (logits[:4], filters)


def check_threshold_of_few_values(dtype: torch.dtype, num_rows: int, vocab: int) -> None:
    """Rows of few different logits: the same tokens as the reference's, but for rounding."""
    generator = torch.Generator().manual_seed(vocab)
    for i in range(num_rows):
        num_values = int(torch.randint(1, 12, (), generator=generator))
        values = (4 * torch.randn(num_values, generator=generator)).to(dtype).to(DEVICE)
        which = torch.randint(num_values, (vocab,), generator=generator).to(DEVICE)
        row = values[which][None]
        top_k = int(torch.randint(vocab + 2, (), generator=generator)) if i % 2 else 0
        top_p = float(torch.rand((), generator=generator)) * 0.99 + 0.005 if i % 3 else 1.0
        rows = torch.tensor([[0.5 + i % 4, top_k, top_p, 0.0]])
        expected = kept_tokens(row, rows, sampling_threshold_reference)
        found = kept_tokens(row, rows, sampling_threshold)
        # One token more or less, of hundreds of equal ones, is rounding.
        assert (found != expected).sum() <= (top_p < 1), (i, rows, found.sum(), expected.sum())
