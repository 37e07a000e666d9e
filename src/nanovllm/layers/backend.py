"""What an attention backend is: elementwise operations, its limits, and a context for each step.

A backend is chosen once, when the engine starts; the layers hold its operations and the model
runner makes its contexts. Nothing below this file knows which one it serves.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from nanovllm.layers.attention import ForwardContext
from nanovllm.layers.ops import Ops

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """Where the T tokens of R rows go in the cache, and what each row attends to; on the device.

    Attributes:
        slot_mapping: int64 [T], -1 writes nothing.
        block_tables: int32 [S, W].
        table_rows: int32 [R], the row of `block_tables` that each row uses; -1 for padding.
        context_lens: int32 [R], positions attended to, the row's own included; 0 for padding.
        cu_seqlens_q: int32 [R + 1], where each row begins in the T tokens.
        max_query_len: of the longest row; 1 makes it a decode step.
        max_context_len: an upper bound of `context_lens`.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    table_rows: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_query_len: int
    max_context_len: int


class Needs(NamedTuple):
    """What an engine asks of its backend."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    head_dim: int


class Backend(Protocol):
    """One way to run attention and what surrounds it."""

    name: str
    default_block_size: int
    ops: Ops
    captures: bool
    """Whether a decode step can be recorded in a CUDA graph."""

    def check(self, needs: Needs) -> None:
        """Raises ValueError, saying what would do, if it cannot run with these (CFG-2)."""
        ...

    def context(self, kv_cache: Tensor, inputs: AttentionInput) -> ForwardContext:
        """The context of one step over `kv_cache: [2, layers, blocks, block_size, heads, dim]`."""
        ...
