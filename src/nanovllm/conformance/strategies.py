"""What the state machine draws: tiny engines, and requests that begin like earlier ones.

Everything comes from a `random.Random`, so that a seed names a story on every machine, and nothing
but the standard library is needed where an engine is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from nanovllm.conformance.operations import Add
from nanovllm.conformance.protocol import Hello, RequestOptions, World
from nanovllm.conformance.session import Session

EOS = 0
TOKENS = (1, 2)
STOP_ID = 2


def draw_world(rng: Random, hello: Hello, options: Mapping[str, Any]) -> World:
    """2-6 blocks (now and then up to 10) of 1-4 tokens."""
    capabilities = hello.capabilities
    block_size = rng.choice((1, 2, 2, 3, 4, 4))
    num_blocks = rng.randint(2, 10) if rng.random() < 0.3 else rng.randint(2, 6)
    max_num_seqs = rng.choice((1, 2, 2, 3, 3, 4))
    budget = rng.choice((rng.randint(max_num_seqs, 8), 16))
    if "chunked_prefill" not in capabilities:
        # A budget below the pool would only make refusals.
        budget = max(max_num_seqs, block_size * num_blocks)
    hashes = ["real"] * 5 + (["constant", "1bit"] if "hash_override" in capabilities else [])
    return World(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=rng.choice((40, 40, max(2, rng.randint(-2, 2) + block_size * num_blocks))),
        eos_token_ids=(EOS,),
        prefix_cache=rng.random() < 0.85,
        hash=rng.choice(hashes),  # type: ignore[arg-type]
        options=options,
    )


def draw_options(rng: Random, hello: Hello, max_tokens: int) -> RequestOptions:
    """Mostly plain; each rarity needs its capability."""
    chosen: dict[str, Any] = {"ignore_eos": rng.random() < 0.6}
    rarity = rng.choice(("n", "n", "salt", "stop", "stop", "min_tokens", *[""] * 8))
    if rarity not in hello.capabilities:
        return RequestOptions(**chosen)
    if rarity == "n":
        chosen["n"] = rng.choice((2, 2, 3, 5))
    elif rarity == "salt":
        chosen["salt"] = rng.choice(("red", "blue"))
    elif rarity == "stop":
        chosen["stop_token_ids"] = (STOP_ID,)
    elif rarity == "min_tokens":
        chosen["min_tokens"] = rng.randint(1, max_tokens + 1)
    return RequestOptions(**chosen)


def draw_request(rng: Random, session: Session) -> Add:
    """A prompt like an earlier one, its outputs included, or a new one; mostly one that fits."""
    world, hello = session.world, session.hello
    entries = list(session.book.entries.values())
    prompt: list[int] = []
    if entries and rng.random() < 0.6:
        earlier = rng.choice(entries).path
        prompt = [node.token for node in earlier[: rng.randint(0, len(earlier))]]
        prompt += rng.choices(TOKENS, k=rng.randint(0, 3))
    else:
        prompt += rng.choices(TOKENS, k=rng.randint(1, rng.choice((4, 12))))
    max_tokens = rng.randint(1, rng.choice((2, 6, 12)))
    odd = rng.random()
    if odd < 0.02:
        max_tokens = rng.choice((0, -1))
    elif odd > 0.05:
        room = min(world.num_blocks * world.block_size + 1, world.max_model_len)
        if "chunked_prefill" not in hello.capabilities:
            room = min(room, world.max_num_batched_tokens + 1)
        prompt = prompt[: room - 1] or [1]
        room -= len(prompt)
        max_tokens = room + rng.randint(1, 2) if odd > 0.96 else min(max_tokens, room)
    options = draw_options(rng, hello, max(max_tokens, 1))
    ends = EOS if rng.random() < 0.5 else STOP_ID
    forced = {rng.randint(1, 4): ends} if rng.random() < 0.25 else {}
    return Add(session.num_requests, tuple(prompt), max_tokens, options, rng.randint(0, 1), forced)
