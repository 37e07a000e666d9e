"""The requests of the benchmarks, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import SamplingParams

NUM_REQUESTS = 256
MIN_LEN, MAX_LEN = 100, 1024
LAST_TOKEN = 10_000
TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how many tokens each is answered with, end of sequence ignored."""

    prompts: tuple[list[int], ...]
    max_tokens: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    def sampling_params(self, **others: Any) -> list[SamplingParams]:
        """One of each request, with these other parameters of `SamplingParams`."""
        return [
            SamplingParams(temperature=TEMPERATURE, max_tokens=count, ignore_eos=True, **others)
            for count in self.max_tokens
        ]


def offline_workload(
    seed: int,
    num_requests: int = NUM_REQUESTS,
    max_len: int = MAX_LEN,
    vocab_size: int = LAST_TOKEN + 1,
) -> Workload:
    """nano-vllm's workload: prompts and outputs of 100 to `max_len` tokens, all there at once.

    With the defaults the draws are, one by one, those of nano-vllm's `bench.py` for this seed. A
    `max_len` below 100 makes all lengths 1 to `max_len`; `vocab_size` bounds the ids.
    """
    rng = random.Random(seed)
    min_len = MIN_LEN if max_len >= MIN_LEN else 1
    last = min(LAST_TOKEN, vocab_size - 1)
    prompts = tuple(
        [rng.randint(0, last) for _ in range(rng.randint(min_len, max_len))]
        for _ in range(num_requests)
    )
    return Workload(prompts, tuple(rng.randint(min_len, max_len) for _ in range(num_requests)))


def batch_workload(
    seed: int, batch_size: int, prompt_len: int, num_tokens: int, vocab_size: int
) -> Workload:
    """`batch_size` equal requests, which decode together."""
    rng = random.Random(seed)
    prompts = tuple(
        [rng.randrange(vocab_size) for _ in range(prompt_len)] for _ in range(batch_size)
    )
    return Workload(prompts, (num_tokens,) * batch_size)


def poisson_arrivals(seed: int, rate: float, count: int) -> list[float]:
    """Seconds from the start at which requests arrive, `rate` a second on average, ascending."""
    if rate <= 0:
        raise ValueError(f"rate must be > 0 requests a second, got {rate}")
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals
