from enum import Enum, auto
from itertools import count

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    block_size = 256
    counter = count()

    def __init__(self, token_ids: list[int], params: SamplingParams) -> None:
        self.seq_id = next(Sequence.counter)
        self.status = SequenceStatus.WAITING
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = 0  # computed, and those found in the cache
        self.num_scheduled_tokens = 0
        self.block_table: list[int] = []
        self.max_tokens = params.max_tokens
        self.ignore_eos = params.ignore_eos

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getstate__(self) -> tuple[object, ...]:
        start, count = self.num_cached_tokens, self.num_scheduled_tokens
        return start, self.block_table, self.token_ids[start : start + count]

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block(self, i: int) -> list[int]:
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
