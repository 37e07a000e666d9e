"""Inputs of a decode step, made on the device from the state that it keeps of its sequences.

What the host says of a step, three short rows, the device reads from the host's memory itself: a
copy before every step would make it wait for longer. Of two such mail slots the host fills one
while the device may still be reading the other.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import cdiv, jit, tl
from nanovllm.kernels.early_launch import wait_for_inputs

_BLOCK = 128


def decode_inputs_reference(
    mail: torch.Tensor,
    turn: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    seats: torch.Tensor,
    context_lens: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """What `decode_inputs` computes."""
    seats.copy_(mail[int(turn) % 2, 0, : len(seats)])
    context_lens.copy_(mail[int(turn) % 2, 1, : len(seats)])
    new_blocks = mail[int(turn) % 2, 2, : len(seats)].to(seats.device)
    live = seats >= 0
    rows = seats.clamp(min=0).long()
    position = (context_lens.long() - 1).where(live, 0)
    is_new = live & (new_blocks >= 0)
    block_tables[rows[is_new], position[is_new] // block_size] = new_blocks[is_new]
    block = block_tables[rows, position // block_size]
    input_ids.copy_(last_tokens[rows].where(live, 0))
    positions.copy_(position)
    slot_mapping.copy_((block.long() * block_size + position % block_size).where(live, -1))


def decode_inputs(
    mail: torch.Tensor,
    turn: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    seats: torch.Tensor,
    context_lens: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write what the model needs of each sequence's last token, whose slot is by KV-1.

    Args:
        mail: int32 [2, 3, R], may be pinned memory of the host; `mail[turn % 2]` has the seats,
            the context lengths and the new blocks of R >= B rows. A new block is that of the row's
            last position if it is not in the table yet, else -1.
        turn: int64 [1].
        last_tokens: int64 [S].
        block_tables: int32 [S, W]; new blocks are written to it.
        block_size: of the cache.
        seats: int32 [B], written: row of `last_tokens` and `block_tables`; -1 is padding, which
            gets token 0 at position 0 and slot -1.
        context_lens: int32 [B], written: positions including the last token's.
        input_ids, positions, slot_mapping: int64 [B], written.
    """
    batch = len(seats)
    _decode_inputs_kernel[(cdiv(batch, _BLOCK),)](
        mail,
        turn,
        last_tokens,
        block_tables,
        seats,
        context_lens,
        input_ids,
        positions,
        slot_mapping,
        batch,
        block_tables.stride(0),
        MAX_ROWS=mail.shape[2],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        launch_pdl=True,
    )


@jit
def _decode_inputs_kernel(
    mail,
    turn,
    last_tokens,
    block_tables,
    seats,
    context_lens,
    input_ids,
    positions,
    slot_mapping,
    batch,
    table_stride,
    MAX_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_inputs()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < batch
    sent = mail + tl.load(turn) % 2 * 3 * MAX_ROWS + i
    seat = tl.load(sent, inside, -1)
    context_len = tl.load(sent + MAX_ROWS, inside, 0)
    new_block = tl.load(sent + 2 * MAX_ROWS, inside, -1)
    tl.store(seats + i, seat, inside)
    tl.store(context_lens + i, context_len, inside)
    live = seat >= 0
    position = tl.where(live, context_len - 1, 0)
    entry = block_tables + seat.to(tl.int64) * table_stride + position // BLOCK_SIZE
    is_new = live & (new_block >= 0)
    tl.store(entry, new_block, is_new)
    block = tl.where(is_new, new_block, tl.load(entry, live & (new_block < 0), 0))
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(input_ids + i, tl.load(last_tokens + seat, live, 0), inside)
    tl.store(positions + i, position, inside)
    tl.store(slot_mapping + i, tl.where(live, slot, -1), inside)
