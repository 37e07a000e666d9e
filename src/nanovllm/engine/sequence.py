"""One request's tokens, progress and block table (SEQ-1..7)."""

from array import array
from enum import Enum, StrEnum, auto

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> FINISHED, and RUNNING -> WAITING by preemption (SEQ-2)."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(StrEnum):
    """Why a sequence ended (SCH-12d)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """One sample of one request.

    Progress is `num_computed_tokens`, the positions whose KV is written::

        |<------ num_prompt_tokens ------>|<--- num_completion_tokens --->|
        [ computed, KV in block_table ............ | not computed yet ....]
        |<--------- num_computed_tokens --------->|<- num_uncomputed_tokens ->|

    Prefill, a chunk of it, decode and the re-prefill after a preemption are all "compute the
    positions `[start, start + count)`"; decode is the case of one uncomputed token.

    While a step is in flight, its positions are `num_in_flight_tokens`, and the token that it will
    draw is the one of `num_pending_tokens`: known by its place, not by its id.
    """

    __slots__ = (
        "abort_requested",
        "block_hashes",
        "block_size",
        "block_table",
        "cacheable",
        "error",
        "finish_reason",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_pending_tokens",
        "num_prompt_tokens",
        "params",
        "salt",
        "seq_id",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        token_ids: list[int],
        params: SamplingParams,
        *,
        block_size: int,
        max_tokens: int,
        cacheable: bool = True,
        salt: str | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.params = params
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.abort_requested = False

        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_pending_tokens = 0
        # Prefix-cache hits at the first admission: a preempted request counts once (PFX-17).
        self.num_cached_tokens: int | None = None

        self.block_table = array("i")
        self.cacheable = cacheable
        self.salt = salt
        # Chained hashes of the leading full blocks; tokens only ever grow, so they stay valid.
        self.block_hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, tokens={self.num_prompt_tokens}"
            f"+{self.num_completion_tokens}, computed={self.num_computed_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and completion."""
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Positions that a plan may take: none of a request that is certain to end (SCH-12)."""
        pending = self.num_pending_tokens
        newest = len(self.token_ids) + pending
        ends = pending and newest - self.num_prompt_tokens >= self.max_tokens
        if ends or self.abort_requested:
            return 0
        return newest - self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_blocks(self) -> int:
        """Logical blocks of the known tokens; what is held is `len(block_table)` (SEQ-3)."""
        return -(-len(self.token_ids) // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        """Tokens in the last block, in `1..block_size` (SEQ-3)."""
        return len(self.token_ids) - (self.num_blocks - 1) * self.block_size

    def block(self, i: int) -> list[int]:
        """Tokens `[i * block_size, (i + 1) * block_size)`, the last block possibly short."""
        if not 0 <= i < self.num_blocks:
            raise IndexError(f"block {i} of a sequence of {self.num_blocks} blocks")
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
