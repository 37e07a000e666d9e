"""Inputs of a decode step, made on the device from the state that it keeps of its sequences."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import cdiv, jit, tl

_BLOCK = 128


def decode_inputs_reference(
    table_rows: torch.Tensor,
    context_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """What `decode_inputs` computes."""
    live = table_rows >= 0
    rows = table_rows.clamp(min=0).long()
    position = (context_lens.long() - 1).where(live, 0)
    block = block_tables[rows, position // block_size]
    input_ids.copy_(last_tokens[rows].where(live, 0))
    positions.copy_(position)
    slot_mapping.copy_((block.long() * block_size + position % block_size).where(live, -1))


def decode_inputs(
    table_rows: torch.Tensor,
    context_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write what the model needs of each sequence's last token, whose slot is by KV-1.

    Args:
        table_rows: int32 [B], row of `last_tokens` and `block_tables`; -1 is padding, which gets
            token 0 at position 0 and slot -1.
        context_lens: int32 [B], positions including the last token's.
        last_tokens: int64 [S].
        block_tables: int32 [S, W].
        block_size: of the cache.
        input_ids, positions, slot_mapping: int64 [B], written.
    """
    batch = len(table_rows)
    _decode_inputs_kernel[(cdiv(batch, _BLOCK),)](
        table_rows,
        context_lens,
        last_tokens,
        block_tables,
        input_ids,
        positions,
        slot_mapping,
        batch,
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )


@jit
def _decode_inputs_kernel(
    table_rows,
    context_lens,
    last_tokens,
    block_tables,
    input_ids,
    positions,
    slot_mapping,
    batch,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < batch
    row = tl.load(table_rows + i, inside, -1).to(tl.int64)
    live = row >= 0
    position = tl.load(context_lens + i, live, 1) - 1
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, live, 0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(input_ids + i, tl.load(last_tokens + row, live, 0), inside)
    tl.store(positions + i, position, inside)
    tl.store(slot_mapping + i, tl.where(live, slot, -1), inside)
