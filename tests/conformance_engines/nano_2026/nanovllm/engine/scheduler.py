from collections import deque

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Scheduler:
    def __init__(self, config: Config) -> None:
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.eos = config.eos
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> tuple[list[Sequence], bool]:
        assert not self.is_finished()
        seqs = self._prefill()
        return (seqs, True) if seqs else (self._decode(), False)

    def _prefill(self) -> list[Sequence]:
        budget, seqs = self.max_num_batched_tokens, []
        for seq in self.running:
            if budget and len(seq) - seq.num_cached_tokens > 1:
                seq.num_scheduled_tokens = min(budget, len(seq) - seq.num_cached_tokens)
                budget -= seq.num_scheduled_tokens
                seqs.append(seq)
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            num_cached_blocks = self.block_manager.can_allocate(seq)
            if num_cached_blocks < 0:
                break
            self.block_manager.allocate(seq, num_cached_blocks)
            seq.num_scheduled_tokens = min(budget, len(seq) - seq.num_cached_tokens)
            budget -= seq.num_scheduled_tokens
            seq.status = SequenceStatus.RUNNING
            self.running.append(self.waiting.popleft())
            seqs.append(seq)
        return seqs

    def _decode(self) -> list[Sequence]:
        seqs = []
        for seq in tuple(self.running):
            while seq in self.running and not self.block_manager.can_append(seq):
                self.preempt(self.running[-1])
            if seq in self.running:
                self.block_manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                seqs.append(seq)
        return seqs

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.status = SequenceStatus.WAITING
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int], is_prefill: bool) -> None:
        for seq, token_id in zip(seqs, token_ids, strict=True):
            self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            if is_prefill and seq.num_cached_tokens < len(seq):
                continue
            seq.append_token(token_id)
            ended = token_id == self.eos and not seq.ignore_eos
            if ended or seq.num_completion_tokens == seq.max_tokens:
                seq.status = SequenceStatus.FINISHED
                self.running.remove(seq)
                self.block_manager.deallocate(seq)
