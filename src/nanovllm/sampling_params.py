"""What a caller may ask of one request: how tokens are drawn, and when generation ends."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

SEED_BITS = 64


class _Range(NamedTuple):
    low: float
    high: float = math.inf
    low_open: bool = False

    def admits(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return math.isfinite(value) and above and value <= self.high

    def __str__(self) -> str:
        left, right = "(" if self.low_open else "[", "]" if math.isfinite(self.high) else ")"
        return f"{left}{self.low}, {self.high}{right}"


_REALS = {
    "temperature": _Range(0.0, 1e30),
    "top_p": _Range(0.0, 1.0, low_open=True),
    "min_p": _Range(0.0, 1.0),
    "repetition_penalty": _Range(1e-3, 1e3),
    "presence_penalty": _Range(-2.0, 2.0),
    "frequency_penalty": _Range(-2.0, 2.0),
}
_MAX_COUNT = 2**31 - 1
_INTEGERS = {
    "top_k": _Range(-1, _MAX_COUNT),
    "n": _Range(1, 2**14),
    "min_tokens": _Range(0, _MAX_COUNT),
}
_OPTIONAL_INTEGERS = {"seed": _Range(0, 2**SEED_BITS - 1), "logprobs": _Range(0, _MAX_COUNT)}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request (SMP-1..7, STP-1..4).

    Raises:
        ValueError: a value outside its range (the message names it), `max_tokens` that is neither
            None nor an integer >= 1 (SCH-7b), `min_tokens > max_tokens` (STP-2).
        TypeError: a value of the wrong type.
    """

    temperature: float = 1.0
    """0 is greedy: the largest logit, the lowest id on ties."""
    max_tokens: int | None = 64
    """Most tokens to generate; None means to the end of the model's context."""
    ignore_eos: bool = False
    top_k: int = 0
    """Keep the k largest logits and the ties of the k-th; 0 and -1 are off."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that reaches this probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the best one."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """64 bits; None lets the engine choose one."""
    n: int = 1
    """Independent samples of the prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; one string or any iterable of them is accepted."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    """Keep the stop string at the end of the text."""
    min_tokens: int = 0
    """No eos, stop id or stop string ends the request before this many tokens."""
    logprobs: int | None = None
    """None is off, 0 the sampled token only, k the k most probable too."""

    def __post_init__(self) -> None:
        for name, allowed in _REALS.items():
            self._store(name, _real(name, getattr(self, name), allowed))
        for name, allowed in _INTEGERS.items():
            self._store(name, _integer(name, getattr(self, name), allowed))
        for name, allowed in _OPTIONAL_INTEGERS.items():
            if getattr(self, name) is not None:
                self._store(name, _integer(name, getattr(self, name), allowed))
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        self._store("stop", _stop_strings(self.stop))
        self._store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.max_tokens is None:
            return
        if not _is_integer(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be None or an integer >= 1, got {self.max_tokens!r}")
        self._store("max_tokens", int(self.max_tokens))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def derive(self, index: int) -> "SamplingParams":
        """Parameters of sample `index` of n: n = 1 and a seed of its own (FRK-1).

        Sample 0 keeps the seed, so it is the request that n = 1 would have been. Without a seed
        there is nothing to derive from: the engine chooses one for each sample.

        Raises:
            ValueError: `index` outside `0..n-1`.
        """
        if not 0 <= index < self.n:
            raise ValueError(f"sample index {index} outside 0..{self.n - 1}")
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None and index > 0:
            digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=SEED_BITS // 8)
            seed = int.from_bytes(digest.digest(), "little")
        return replace(self, n=1, seed=seed)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits (SMP-7)."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )

    @property
    def is_plain(self) -> bool:
        """Whether the logits are drawn from as they are, and nothing but the token is reported."""
        return not (self.logprobs is not None or self.has_penalties or self.min_tokens)

    def end_token_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Ids that end this request: the stop ids, and the model's eos ids unless ignored."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(name: str, value: Any, allowed: _Range) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not allowed.admits(float(value)):
        raise ValueError(f"{name} must be in {allowed}, got {value!r}")
    return float(value)


def _integer(name: str, value: Any, allowed: _Range) -> int:
    if not _is_integer(value):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not allowed.low <= value <= allowed.high:
        raise ValueError(f"{name} must be in {allowed}, got {value!r}")
    return int(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"stop must be a string or strings, got {value!r}")
    strings = tuple(value)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop must hold strings, got {string!r}")
        if not string:
            raise ValueError("stop must not hold an empty string, which would match at once: ''")
    return strings


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise TypeError(f"{name} must be integers, got {value!r}")
    return tuple(_integer(f"{name}[{i}]", item, _Range(0)) for i, item in enumerate(value))
