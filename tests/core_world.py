"""Hypothesis strategies of the core door: tiny engines, and requests that share prefixes."""

from __future__ import annotations

from typing import Any

from core_door import Door
from hypothesis import strategies as st

from nanovllm.engine.block_manager import HashFunction, hash_block

EOS = 0
ALPHABET = (EOS, 1, 2)


def constant_hash(tokens: bytes, parent_hash: bytes) -> bytes:
    return b"same"


def one_bit_hash(tokens: bytes, parent_hash: bytes) -> bytes:
    return bytes([sum(tokens + parent_hash) % 2])


HASHES: tuple[HashFunction, ...] = (hash_block, constant_hash, one_bit_hash)


@st.composite
def doors(draw: st.DrawFn, hashes: tuple[HashFunction, ...] = HASHES) -> Door:
    """An engine of 2-10 blocks of 1-4 tokens."""
    max_num_seqs = draw(st.integers(1, 4))
    return Door(
        hash_function=draw(st.sampled_from(hashes)),
        alphabet=ALPHABET,
        kvcache_block_size=draw(st.integers(1, 4)),
        num_kvcache_blocks=draw(st.integers(2, 10)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 12)),
        max_model_len=draw(st.sampled_from([40, 12])),
        max_consecutive_prefills=draw(st.sampled_from([8, 1, 2])),
        eos_token_ids=frozenset({EOS}),
        policy=draw(st.sampled_from(["prefill_first", "mixed"])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def params(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of `Door.add`."""
    max_tokens = draw(st.integers(1, 10))
    rare = draw(st.integers(0, 5))
    return {
        "max_tokens": None if rare == 4 else max_tokens,
        "seed": draw(st.integers(0, 3)),
        "ignore_eos": draw(st.booleans()),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "min_tokens": draw(st.integers(0, max_tokens)) if rare == 1 else 0,
        "stop_token_ids": (draw(st.sampled_from(ALPHABET)),) if rare == 2 else (),
        "salt": draw(st.sampled_from(["red", "blue"])) if rare == 3 else None,
    }


prompts = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=14)
