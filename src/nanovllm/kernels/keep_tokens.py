"""The newest token of each sequence, kept on the device for the step that comes next."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import cdiv, jit, tl

_BLOCK = 128


def keep_tokens_reference(
    last_tokens: torch.Tensor, seats: torch.Tensor, token_ids: torch.Tensor
) -> None:
    """What `keep_tokens` computes."""
    live = seats >= 0
    last_tokens[seats[live].long()] = token_ids[live].clamp(min=0)


def keep_tokens(last_tokens: torch.Tensor, seats: torch.Tensor, token_ids: torch.Tensor) -> None:
    """`last_tokens[seats] = token_ids`.

    A row without a token, -1, ends; until the host knows, its seat holds an id that exists.

    Args:
        last_tokens: int64 [S], written.
        seats: int32 [B]; -1, a padding row, writes nothing.
        token_ids: int64 [B].
    """
    batch = len(seats)
    _keep_tokens_kernel[(cdiv(batch, _BLOCK),)](last_tokens, seats, token_ids, batch, BLOCK=_BLOCK)


@jit
def _keep_tokens_kernel(last_tokens, seats, token_ids, batch, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seat = tl.load(seats + i, i < batch, -1)
    token = tl.load(token_ids + i, i < batch, 0)
    tl.store(last_tokens + seat, tl.maximum(token, 0), seat >= 0)
