"""What the suite asks of an engine: three doors, and the values that pass through them.

An engine is known only through these. An adapter implements one or more doors in the engine's own
interpreter; `host.py` serves it over JSON lines, or the reference runs in-process. Everything here
is made of integers, strings, lists and objects, so that any language can speak it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

PROTOCOL = 1
"""Number in `hello`; a change that an old adapter would misread makes a new one."""

Door = Literal["blocks", "core", "engine", "gpu", "perf"]

CORE_CAPABILITIES = frozenset(
    {
        "abort",
        "chunked_prefill",
        "cow",
        "fail_step",
        "hash",
        "hash_override",
        "min_tokens",
        "n",
        "pool",
        "prefix_cache",
        "salt",
        "stats",
        "stop",
        "wire",
    }
)
ENGINE_CAPABILITIES = frozenset(
    {
        "abort",
        "fail_step",
        "graphs",
        "greedy",
        "logprobs",
        "min_p",
        "min_tokens",
        "n",
        "penalties",
        "prefix_cache",
        "sampling",
        "seed",
        "stop",
        "stream",
        "top_k",
        "top_p",
        "tp",
    }
)
CAPABILITIES = CORE_CAPABILITIES | ENGINE_CAPABILITIES


class Unsupported(Exception):  # noqa: N818
    """The adapter does not offer what was asked for; never held against the engine."""


class Refused(Exception):  # noqa: N818
    """The engine refused a request with an error of its own, which the message quotes (SCH-7)."""


class EngineFault(Exception):  # noqa: N818
    """Anything else that the engine raised, its death or its silence."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who answers, and what it declares.

    Attributes:
        ahead: 1 if a second plan may be asked for before the first is committed.
        capabilities: of `CAPABILITIES`; what is not declared is not tested.
    """

    engine: str
    version: str
    doors: tuple[str, ...]
    capabilities: frozenset[str] = frozenset()
    ahead: int = 0
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class World:
    """Configuration of an engine at the blocks and core doors; tiny ones make short stories.

    `hash` is `real`, or `constant` or `1bit` for engines with `hash_override`. `options` are the
    user's own (`--engine-option`), passed through.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    hash: Literal["real", "constant", "1bit"] = "real"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request may ask for beyond its prompt; each needs the capability of its name."""

    n: int = 1
    salt: str | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class RequestId(NamedTuple):
    """One sample of a request; the suite numbers requests in order of arrival."""

    request: int
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Compute the positions `[start, start + count)` of a request, through this table.

    `block_table` covers at least these positions. A row that reaches the last known token is given
    the next one at commit. `phase` is what the engine calls it, for reports only.
    """

    id: RequestId
    start: int
    count: int
    block_table: tuple[int, ...]
    phase: str | None = None

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended: `stop`, `length`, `abort` or `error`."""

    id: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. A returned plan is always executed, then committed or failed.

    Attributes:
        step: names the plan in `commit` and `fail_step`.
        preempted: who lost its blocks while this was planned.
        finished: who was given up while this was planned.
        copies: `(source block, target block)` done before any row writes (capability `cow`).
    """

    step: int
    rows: tuple[Row, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    finished: tuple[Finished, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """A hittable block: its own tokens, or None if the engine does not keep them."""

    block: int
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool between two calls (capability `pool`).

    `free` and the keys of `ref_counts` with a count >= 1 are disjoint and, with `reserved`, all
    blocks. `published` needs `prefix_cache`.
    """

    free: tuple[int, ...]
    ref_counts: Mapping[int, int]
    published: tuple[Published, ...] = ()
    reserved: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Prefix-cache totals (capability `stats`): prompt tokens looked up, and found."""

    num_lookup_tokens: int
    num_cached_tokens: int


class BlocksDoor(Protocol):
    """For those who have only a block manager; all of it, before a scheduler exists."""

    def hello(self) -> Hello: ...

    def reset(self, world: World) -> None: ...

    def lookup(self, token_ids: Sequence[int]) -> int:
        """Tokens of leading full blocks that are cached now; changes nothing."""
        ...

    def allocate(self, request: int, token_ids: Sequence[int]) -> tuple[list[int], int] | None:
        """`(table, cached tokens)` for all tokens, whose KV the caller then computes; None if
        blocks are short, and then nothing has changed."""
        ...

    def append(self, request: int, token_id: int) -> list[int] | None:
        """Add a token, computed at once; the table that covers it, or None if blocks are short."""
        ...

    def release(self, request: int) -> None: ...

    def pool(self) -> PoolView: ...


class CoreDoor(Protocol):
    """Block manager and scheduler, without a model: the suite plays the model."""

    def hello(self) -> Hello: ...

    def reset(self, world: World) -> None:
        """Start anew; everything before is forgotten."""
        ...

    def add(
        self, request: int, prompt: Sequence[int], max_tokens: int, options: RequestOptions
    ) -> None:
        """Raises Refused if the engine will never run it."""
        ...

    def schedule(self) -> Plan: ...

    def commit(self, step: int, tokens: Mapping[RequestId, int]) -> list[Finished]:
        """The plan was executed; `tokens` has one for each row up to the last known token."""
        ...

    # ---- each of these needs the capability of its name --------------------------------------

    def abort(self, request: int) -> bool:
        """False if it is unknown or has ended."""
        ...

    def fail_step(self, step: int) -> list[Finished]:
        """The oldest plan in flight raised: nothing of it was computed, nor of any behind it."""
        ...

    def pool(self) -> PoolView: ...

    def hash(self, token_ids: Sequence[int], parent: str | None) -> str:
        """Hash of a full block behind `parent`, as text; None is the root."""
        ...

    def wire(self, id: RequestId) -> int:
        """Bytes that cross to a worker for this request's row of the plan in flight (SEQ-6)."""
        ...

    def stats(self) -> CacheStats: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt at the engine door; `params` holds the names of `SamplingParams`."""

    prompt: str | tuple[int, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One sample's outcome; counts where the engine tells them."""

    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


class EngineDoor(Protocol):
    """The black box: a model directory and options in, generated tokens out."""

    def hello(self) -> Hello: ...

    def open(self, model: str, options: Mapping[str, Any]) -> None:
        """Make an engine; one that is open is closed first."""
        ...

    def generate(self, requests: Sequence[EngineRequest]) -> list[list[EngineResult]]:
        """All requests as one batch; per request its samples, in order. Raises Refused."""
        ...

    # ---- capabilities ------------------------------------------------------------------------

    def stream(self, request: EngineRequest, abort_after: int | None = None) -> list[str]:
        """The pieces of text of one request; left (and so aborted) after `abort_after` pieces."""
        ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None: ...
