"""Workloads: conversations whose prompts share what real ones share, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, behind all that was said before, and how long the answer may be."""

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation; each turn is a request that arrives when the answer before it has ended.

    Attributes:
        arrives: step before which the first turn arrives.
    """

    turns: tuple[Turn, ...]
    arrives: int = 0


def text(rng: Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def chats(
    num_talks: int, *, seed: int = 0, num_turns: int = 3, system: int = 150, every: int = 2
) -> list[Talk]:
    """Short turns behind one of three system prompts of about `system` tokens."""
    rng = Random(seed)
    systems = [text(rng, system + rng.randrange(32)) for _ in range(3)]
    talks = []
    for i in range(num_talks):
        turns = [Turn(text(rng, rng.randint(8, 80)), rng.randint(8, 80)) for _ in range(num_turns)]
        turns[0] = Turn(rng.choice(systems) + turns[0].tokens, turns[0].max_tokens)
        talks.append(Talk(tuple(turns), i * every))
    return talks


def documents(
    num_documents: int,
    *,
    seed: int = 0,
    num_questions: int = 3,
    lengths: tuple[int, int] = (1200, 2400),
    every: int = 4,
) -> list[Talk]:
    """Several people ask about the same long document, each a question of their own."""
    rng = Random(seed)
    asked = [
        document + text(rng, rng.randint(10, 40))
        for document in (text(rng, rng.randint(*lengths)) for _ in range(num_documents))
        for _ in range(num_questions)
    ]
    return singles(((prompt, rng.randint(20, 100)) for prompt in asked), every=every)


def uneven(num_requests: int, *, seed: int = 0, every: int = 3) -> list[Talk]:
    """Prompts of 8 to 120 tokens that share nothing, answers of 8 to 120 tokens."""
    rng = Random(seed)
    return singles(
        ((text(rng, rng.randint(8, 120)), rng.randint(8, 120)) for _ in range(num_requests)),
        every=every,
    )


def singles(asked: Iterable[tuple[tuple[int, ...], int]], *, every: int) -> list[Talk]:
    """One request each, `every` steps apart."""
    return [Talk((Turn(*ask),), i * every) for i, ask in enumerate(asked)]


def assembled(num_requests: int, *, seed: int = 0, every: int = 1) -> list[Talk]:
    """Prompts of some of 20 paragraphs of 16 tokens in any order: equal blocks, other ancestors."""
    rng = Random(seed)
    paragraphs = [text(rng, 16) for _ in range(20)]
    prompts = (
        sum((rng.choice(paragraphs) for _ in range(rng.randint(2, 8))), ())
        for _ in range(num_requests)
    )
    return singles((((*prompt, 1), rng.randint(1, 8)) for prompt in prompts), every=every)
