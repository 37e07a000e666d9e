"""A scheduled step as plain arrays: all that the model, and a worker, needs to know (SEQ-6)."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.step import ScheduledRow, ScheduledStep

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """T tokens in R rows; no sequence objects below this line.

    Attributes:
        input_ids: [T] the tokens to compute; below 0 one that a step in flight is to draw, see
            `name_pending_tokens`.
        positions: [T] their positions, `start .. start + count - 1` of each row (KV-7).
        slot_mapping: [T] where their KV goes: `table[i // bs] * bs + i % bs` (KV-1).
        cu_seqlens_q: [R + 1] where each row begins in the T tokens.
        context_lens: [R] positions that a row attends to, its own included.
        block_tables: [R, W] padded with -1.
        last_tokens: [S] index in T of the last token of each row that samples (KV-8).
    """

    input_ids: Int64
    positions: Int64
    slot_mapping: Int64
    cu_seqlens_q: Int32
    context_lens: Int32
    block_tables: Int32
    last_tokens: Int64


def stack_block_tables(rows: tuple[ScheduledRow, ...]) -> Int32:
    """Tables of the rows, [R, W], padded with -1 (four bytes of 0xff); W is the longest one's."""
    width = 4 * max(len(row.block_table) for row in rows)
    packed = bytearray().join(row.block_table.tobytes().ljust(width, b"\xff") for row in rows)
    return np.frombuffer(packed, dtype=np.int32).reshape(len(rows), -1)


def prepare_model_input(step: ScheduledStep, block_size: int) -> ModelInput:
    """Arrays of a step with at least one row."""
    rows = step.rows
    starts = np.array([row.start for row in rows], dtype=np.int64)
    counts = np.array([row.count for row in rows], dtype=np.int64)
    cu_seqlens_q = np.concatenate(([0], np.cumsum(counts)))
    block_tables = stack_block_tables(rows)

    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(cu_seqlens_q[-1]) + np.repeat(starts - cu_seqlens_q[:-1], counts)
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)
    tokens = chain.from_iterable(_tokens(row) for row in rows)
    samples = np.array([row.samples for row in rows])
    return ModelInput(
        input_ids=np.fromiter(tokens, dtype=np.int64, count=len(positions)),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        context_lens=(starts + counts).astype(np.int32),
        block_tables=block_tables,
        last_tokens=cu_seqlens_q[1:][samples] - 1,
    )


def _tokens(row: ScheduledRow) -> list[int]:
    """Tokens of a row, -1 for the one that is not known yet."""
    tokens = row.seq.token_ids[row.start : row.end]
    return tokens if len(tokens) == row.count else [*tokens, -1]


def name_pending_tokens(inputs: ModelInput, seats: Int32) -> None:
    """Replace each token that is not known by `-1 - seat` of its row: its seat will hold it."""
    unknown = np.flatnonzero(inputs.input_ids < 0)
    rows = np.searchsorted(inputs.cu_seqlens_q, unknown, side="right") - 1
    inputs.input_ids[unknown] = -1 - seats[rows]
