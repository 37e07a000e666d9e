from enum import Enum, auto
from itertools import count


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    block_size = 0
    counter = count()

    @classmethod
    def set_block_size(cls, block_size: int) -> None:
        cls.block_size = block_size

    def __init__(self, token_ids, sampling_params):
        self.seq_id = next(Sequence.counter)
        self.status = SequenceStatus.WAITING
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = self.num_tokens = len(token_ids)
        self.num_cached_tokens = 0
        self.block_table = []
        self.max_tokens = sampling_params.max_tokens
        self.ignore_eos = sampling_params.ignore_eos

    def __len__(self):
        return self.num_tokens

    @property
    def num_blocks(self):
        return -(-self.num_tokens // self.block_size)

    def block(self, i):
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id):
        self.token_ids.append(token_id)
        self.num_tokens += 1
