from collections import deque

from .block_manager import BlockManager
from .sequence import SequenceStatus


class Scheduler:
    def __init__(self, config):
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.eos = config.eos
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.waiting = deque()
        self.running = deque()

    def add(self, seq):
        self.waiting.append(seq)

    def schedule(self):
        seqs, budget = [], self.max_num_batched_tokens
        while self.waiting and len(seqs) < self.max_num_seqs:
            seq = self.waiting[0]
            if len(seq) > budget or not self.block_manager.can_allocate(seq):
                break
            self.block_manager.allocate(seq)
            budget -= len(seq) - seq.num_cached_tokens
            seq.status = SequenceStatus.RUNNING
            self.running.append(self.waiting.popleft())
            seqs.append(seq)
        if seqs:
            return seqs, True
        for seq in tuple(self.running):
            while seq in self.running and not self.block_manager.can_append(seq):
                self.preempt(self.running[-1])
            if seq in self.running:
                self.block_manager.may_append(seq)
                seqs.append(seq)
        return (seqs, False) if seqs else None

    def preempt(self, seq):
        self.running.remove(seq)
        seq.status = SequenceStatus.WAITING
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def postprocess(self, seqs, token_ids):
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.append_token(token_id)
            ended = token_id == self.eos and not seq.ignore_eos
            if ended or len(seq) - seq.num_prompt_tokens == seq.max_tokens:
                seq.status = SequenceStatus.FINISHED
                self.running.remove(seq)
                self.block_manager.deallocate(seq)
