"""From the fused projection to attention: QK norm, rotary embedding, KV store (KV-1, MOD-4, MOD-7).

Keys and values go from the projection's output straight to their slots of the paged cache; as
tensors of their own they never exist.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import cdiv, jit, next_power_of_2, tl
from nanovllm.kernels.early_launch import wait_for_inputs
from nanovllm.kernels.rms_norm import rms_norm_reference
from nanovllm.kernels.rotary_embedding import apply_rotary_emb
from nanovllm.kernels.store_kvcache import slot_offset, store_kvcache_reference

_HEADS = 8
"""Heads of a token that one program works on: 2 KiB of a 16-bit dtype at head_dim 128."""


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """What `qk_norm_rope_store` computes."""
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, dim)
    q, k, v = heads.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    cos, sin = torch.split(cos_sin[positions], 1, dim=1)
    q = apply_rotary_emb(rms_norm_reference(q, q_weight, eps), cos, sin)
    k = apply_rotary_emb(rms_norm_reference(k, k_weight, eps), cos, sin)
    store_kvcache_reference(k, v, k_cache, v_cache, slot_mapping)
    return q


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate the query and key heads, store keys and values, return the queries.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous.
        q_weight, k_weight: [head_dim], of the norms.
        eps: of the norms.
        cos_sin: [P, 2, head_dim / 2] fp32, contiguous: half-split rotary embedding.
        positions: int [T].
        slot_mapping: int64 [T]; -1 writes nothing (KV-2).
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], equal strides, the last
            two dimensions contiguous.

    Returns:
        [T, num_heads, head_dim].
    """
    assert qkv.is_contiguous(), qkv.stride()
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    block_size, kv_heads, dim = k_cache.shape[1:]
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(len(qkv), num_heads, dim)
    grid = (len(qkv), cdiv(num_heads, _HEADS) + cdiv(kv_heads, _HEADS))
    _qk_norm_rope_store_kernel[grid](
        qkv,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        positions,
        slot_mapping,
        k_cache,
        v_cache,
        q,
        *k_cache.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=_HEADS,
        BLOCK_HALF=next_power_of_2(dim // 2),
        num_warps=2,
        launch_pdl=True,
    )
    return q


@jit
def _qk_norm_rope_store_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    q,
    block_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """The second dimension of the grid is the tiles of query heads, then those of KV heads."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    queries = qkv + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    column = tl.arange(0, BLOCK_HALF)[None, :]
    angle = tl.load(positions + token).to(tl.int64) * HEAD_DIM + column
    in_half = column < HEAD_DIM // 2
    cos = tl.load(cos_sin + angle, in_half, 0.0)
    sin = tl.load(cos_sin + angle + HEAD_DIM // 2, in_half, 0.0)
    if tile < query_tiles:
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        inside = (head < NUM_HEADS) & in_half
        offset = head * HEAD_DIM + column
        first, second = _norm_rope(queries + offset, inside, q_weight, eps, cos, sin, HEAD_DIM)
        out = q + token * NUM_HEADS * HEAD_DIM + offset
        tl.store(out, first, inside)
        tl.store(out + HEAD_DIM // 2, second, inside)
    else:
        head = (tile - query_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        slot = tl.load(slot_mapping + token)
        num_stored = tl.where(slot < 0, 0, NUM_KV_HEADS)
        inside = (head < num_stored) & in_half
        offset = head * HEAD_DIM + column
        keys = queries + NUM_HEADS * HEAD_DIM
        first, second = _norm_rope(keys + offset, inside, k_weight, eps, cos, sin, HEAD_DIM)
        values = keys + NUM_KV_HEADS * HEAD_DIM + offset
        first_value = tl.load(values, inside)
        second_value = tl.load(values + HEAD_DIM // 2, inside)
        where = slot_offset(slot, block_stride, slot_stride, BLOCK_SIZE) + offset
        tl.store(k_cache + where, first, inside)
        tl.store(k_cache + where + HEAD_DIM // 2, second, inside)
        tl.store(v_cache + where, first_value, inside)
        tl.store(v_cache + where + HEAD_DIM // 2, second_value, inside)


@jit
def _norm_rope(heads, inside, weight, eps, cos, sin, HEAD_DIM: tl.constexpr):
    """Both halves of the rows at `heads`, normed and rotated."""
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, inside.shape[1])[None, :]
    first = tl.load(heads, inside, 0.0)
    second = tl.load(heads + half, inside, 0.0)
    first32, second32 = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first32 * first32 + second32 * second32, 1, keep_dims=True)
    inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)
    first_weight = tl.load(weight + column, column < half, 0.0)
    second_weight = tl.load(weight + half + column, column < half, 0.0)
    first32 = _scale(first32 * inverse_rms, first_weight, first.dtype)
    second32 = _scale(second32 * inverse_rms, second_weight, first.dtype)
    return first32 * cos - second32 * sin, second32 * cos + first32 * sin


@jit
def _scale(normed, weight, dtype: tl.constexpr):
    """Times the weight with the roundings of `rms_norm`, and back to fp32."""
    normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype).to(tl.float32)
