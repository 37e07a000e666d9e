"""Scatter new keys and values into their slots of the paged cache (KV-1, KV-2)."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import cdiv, jit, next_power_of_2, tl

_HEADS = 8
"""Heads of a token that one program copies."""


def store_kvcache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write row i of `key` and `value` to slot `slot_mapping[i]`, in place.

    Args:
        key, value: [T, num_kv_heads, head_dim]; rows beyond the slots are padding.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        slot_mapping: int64 [S], S <= T; `block * block_size + offset`, or -1 for a row that is
            padding and writes nothing.
    """
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    k_cache.view(-1, *k_cache.shape[2:])[slots] = _as_stored(key[rows], k_cache.dtype)
    v_cache.view(-1, *v_cache.shape[2:])[slots] = _as_stored(value[rows], v_cache.dtype)


def _as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast for the cache; float8 saturates, as it does on a GPU."""
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`store_kvcache_reference` by Triton.

    Here `key` and `value` may have any stride between tokens, the caches (with equal strides) any
    between blocks and slots; heads and their dimensions are contiguous.
    """
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    block_size, kv_heads, dim = k_cache.shape[1:]
    _store_kvcache_kernel[(len(slot_mapping), cdiv(kv_heads, _HEADS))](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        *k_cache.stride()[:2],
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=_HEADS,
        BLOCK_D=next_power_of_2(dim),
        num_warps=2,
    )


@jit
def _store_kvcache_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    key_stride,
    value_stride,
    block_stride,
    slot_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    num_stored = tl.where(slot < 0, 0, NUM_KV_HEADS)
    inside = (head < num_stored) & (column < HEAD_DIM)
    offset = head * HEAD_DIM + column
    where = slot_offset(slot, block_stride, slot_stride, BLOCK_SIZE) + offset
    tl.store(k_cache + where, tl.load(key + token * key_stride + offset, inside), inside)
    tl.store(v_cache + where, tl.load(value + token * value_stride + offset, inside), inside)


@jit
def slot_offset(slot, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr):
    """Elements before int64 `slot` of the cache; 64 bits, as caches outgrow 32 (KV-6)."""
    return slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
