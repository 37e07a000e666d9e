"""KV: positions, slots and masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_input import ModelInput, prepare_model_input
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep, StepBuilder
from nanovllm.kernels.paged_attention import attend_row
from nanovllm.kernels.store_kvcache import store_kvcache_reference

Tensor = torch.Tensor


@planted("KV-1")
class TablesGrowAtTheirHead(BlockManager):
    """A new block goes to the front of the table."""

    def may_append(self, seq: Sequence, num_tokens: int) -> None:
        held = len(seq.block_table)
        super().may_append(seq, num_tokens)
        seq.block_table = seq.block_table[held:] + seq.block_table[:held]


@planted("KV-2", instead_of=store_kvcache_reference, door="unit")
def padding_writes_the_last_slot(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Slot -1 is used as an index."""
    k_cache.view(-1, *k_cache.shape[2:])[slot_mapping] = key[: len(slot_mapping)].to(k_cache.dtype)
    v_cache.view(-1, *v_cache.shape[2:])[slot_mapping] = value[: len(slot_mapping)].to(
        v_cache.dtype
    )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, gqa: bool = True
) -> Tensor:
    """q [C, heads, d] over k, v [L, kv_heads, d] where mask [C, L] is true."""
    o = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=gqa,
    )
    return o[0].transpose(0, 1)


def _causal(count: int, length: int, offset: int) -> Tensor:
    return torch.ones(count, length, dtype=torch.bool).tril(offset)


@planted("KV-3", instead_of=attend_row, door="unit")
def unused_slots_are_masked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: int, scale: float
) -> Tensor:
    """What lies behind the context in its last block is masked instead of cut off."""
    k, v = k_cache[block_table].flatten(0, 1), v_cache[block_table].flatten(0, 1)
    mask = _causal(len(q), len(k), context_len - len(q))
    return _attend(q, k, v, mask, scale)


@planted("KV-4", instead_of=attend_row, door="unit")
def heads_are_grouped_in_turn(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: int, scale: float
) -> Tensor:
    """Query head h reads KV head h % kv_heads instead of the one of its group."""
    k = k_cache[block_table].flatten(0, 1)[:context_len]
    v = v_cache[block_table].flatten(0, 1)[:context_len]
    groups = q.shape[1] // k.shape[1]
    mask = _causal(len(q), context_len, context_len - len(q))
    return _attend(q, k.repeat(1, groups, 1), v.repeat(1, groups, 1), mask, scale, gqa=False)


@planted("KV-5", instead_of=attend_row, door="engine")
def mask_begins_at_the_row(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: int, scale: float
) -> Tensor:
    """The causal mask of a longer row is aligned to the row's beginning, not to its position."""
    k = k_cache[block_table].flatten(0, 1)[:context_len]
    v = v_cache[block_table].flatten(0, 1)[:context_len]
    offset = context_len - 1 if len(q) == 1 else 0
    return _attend(q, k, v, _causal(len(q), context_len, offset), scale)


@planted("KV-6", instead_of=prepare_model_input, door="unit")
def slots_of_32_bits(step: ScheduledStep, block_size: int) -> ModelInput:
    """Slots are 32-bit numbers, and so is the offset that a slot times its size makes."""
    inputs = prepare_model_input(step, block_size)
    return replace(inputs, slot_mapping=inputs.slot_mapping.astype(np.int32))


@planted("KV-7")
class WorkIsCountedBeforeTheLookup(StepBuilder):
    """The tokens to run are the full length, though the cached ones were found meanwhile."""

    def add(self, seq: Sequence, count: int) -> None:
        super().add(seq, count)
        if seq.num_computed_tokens and count > 1:
            self.rows[-1] = self.rows[-1]._replace(count=seq.num_tokens)


@planted("KV-7", instead_of=prepare_model_input, door="engine")
def positions_restart_in_each_row(step: ScheduledStep, block_size: int) -> ModelInput:
    """Positions of a prompt's row are counted from the row's beginning."""
    inputs = prepare_model_input(step, block_size)
    starts = [row.start if row.is_decode else 0 for row in step.rows]
    ranges = [start + np.arange(row.count) for start, row in zip(starts, step.rows, strict=True)]
    return replace(inputs, positions=np.concatenate(ranges))


@planted("KV-8", instead_of=prepare_model_input, door="engine")
def rows_are_sorted_and_tokens_are_not(step: ScheduledStep, block_size: int) -> ModelInput:
    """Logits are taken from the longest row first, and handed out in the order of the plan."""
    inputs = prepare_model_input(step, block_size)
    counts = [row.count for row in step.rows if row.samples]
    longest_first = np.argsort([-count for count in counts], kind="stable")
    return replace(inputs, last_tokens=inputs.last_tokens[longest_first])


@planted("PFX-12", instead_of=prepare_model_input, door="engine")
def warm_rows_overwrite_their_prefix(step: ScheduledStep, block_size: int) -> ModelInput:
    """Behind a cached prefix, keys and values are stored from the table's first slot on."""
    inputs = prepare_model_input(step, block_size)
    slots = inputs.slot_mapping.copy()
    for row, begin in zip(step.rows, inputs.cu_seqlens_q, strict=False):
        if row.start and row.start == row.seq.num_cached_tokens:
            offsets = np.arange(row.count)
            table = np.array(row.block_table)
            slots[begin : begin + row.count] = (
                table[offsets // block_size] * block_size + offsets % block_size
            )
    return replace(inputs, slot_mapping=slots)


FAULTS = plantings_in(globals())
