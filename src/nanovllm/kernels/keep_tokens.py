"""The newest token of each sequence: kept on the device for its next step, posted to the host."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import cdiv, jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs

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
    _keep_tokens_kernel[(cdiv(batch, _BLOCK),)](
        last_tokens, seats, token_ids, batch, BLOCK=_BLOCK, launch_pdl=True
    )


def post_tokens_reference(token_ids: torch.Tensor, mail: torch.Tensor, turn: torch.Tensor) -> None:
    """What `post_tokens` computes."""
    mail[int(turn) % 2, : len(token_ids)] = token_ids.to(mail.device)
    turn += 1


def post_tokens(token_ids: torch.Tensor, mail: torch.Tensor, turn: torch.Tensor) -> None:
    """Write the tokens of a step to `mail[turn % 2]`, then go on to the next turn.

    Args:
        token_ids: int64 [B].
        mail: int64 [2, R], R >= B, may be pinned memory of the host.
        turn: int64 [1], written.
    """
    batch, max_rows = len(token_ids), mail.shape[1]
    block = next_power_of_2(max_rows)
    _post_tokens_kernel[(1,)](
        token_ids, mail, turn, batch, MAX_ROWS=max_rows, BLOCK=block, launch_pdl=True
    )


@jit
def _keep_tokens_kernel(last_tokens, seats, token_ids, batch, BLOCK: tl.constexpr):
    wait_for_inputs()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seat = tl.load(seats + i, i < batch, -1)
    token = tl.load(token_ids + i, i < batch, 0)
    tl.store(last_tokens + seat, tl.maximum(token, 0), seat >= 0)


@jit
def _post_tokens_kernel(token_ids, mail, turn, batch, MAX_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_inputs()
    i = tl.arange(0, BLOCK)
    now = tl.load(turn)
    token = tl.load(token_ids + i, i < batch, 0)
    tl.store(mail + now % 2 * MAX_ROWS + i, token, i < batch)
    tl.debug_barrier()  # all threads have read `turn`
    tl.store(turn, now + 1)
