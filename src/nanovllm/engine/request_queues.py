"""Who is there: requests come, wait, get a seat, lose it, and end (SEQ-2, FRK).

Both queues are kept in order of arrival, so that preemption takes from the tail of `running` and
admission from the head of `waiting`, and nobody overtakes an earlier request. Who moves when is the
scheduler's affair.
"""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass, replace

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import BlockManager, HashFunction
from nanovllm.engine.limits import max_output_tokens
from nanovllm.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start; a request's hits count at its first admission only (PFX-17)."""

    num_requests: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_lookup_tokens: int = 0
    num_cached_tokens: int = 0


def by_arrival(seq: Sequence) -> int:
    return seq.seq_id


class RequestQueues:
    """Every live sequence, in one of the queues or behind the first sample of its request.

    Args:
        config: limits, seed.
        hash_function: see `BlockManager`; for tests.
    """

    def __init__(self, config: SchedulerConfig, hash_function: HashFunction) -> None:
        self.config = config
        self.block_manager = BlockManager(
            config.num_kvcache_blocks, config.kvcache_block_size, hash_function
        )
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Samples 1..n-1 of a request wait here until sample 0 has computed the prompt (FRK-2).
        self.followers: dict[int, list[Sequence]] = {}
        self.stats = SchedulerStats()
        self._live: dict[int, Sequence] = {}
        self._next_seq_id = 0
        self._seeds = random.Random(config.seed)

    # ---- from outside ----------------------------------------------------------------------

    def validate(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Output tokens the request may take; ValueError if it can never run (SCH-7)."""
        return max_output_tokens(self.config, num_prompt_tokens, params.max_tokens)

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        """Queue a request; returns its `params.n` sequences in order of sample.

        Different salts never share blocks (PFX-14). ValueError if it can never run (SCH-7).
        """
        max_tokens = self.validate(len(prompt_token_ids), params)
        first_id = self._next_seq_id
        if not self.config.enable_prefix_caching:
            # Nobody else has this salt, but the samples of one request still share their prompt.
            salt = f"request-{first_id}"
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        samples = tuple(
            Sequence(
                first_id + i,
                prompt_token_ids,
                params.derive(i),
                block_size=self.config.kvcache_block_size,
                max_tokens=max_tokens,
                cacheable=self.config.enable_prefix_caching or params.n > 1,
                salt=salt,
            )
            for i in range(params.n)
        )
        self._next_seq_id += params.n
        self._live.update((seq.seq_id, seq) for seq in samples)
        self.waiting.append(samples[0])
        if params.n > 1:
            self.followers[first_id] = list(samples[1:])
        self.stats.num_requests += 1
        return samples

    def reset_prefix_cache(self) -> None:
        """Forget all published content; what runs is not affected (API-8)."""
        self.block_manager.reset_prefix_cache()

    def is_finished(self) -> bool:
        return not self._live

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self.running)

    # ---- from one state to the next --------------------------------------------------------

    def _start(self, seq: Sequence, num_cached: int) -> None:
        self.waiting.pop(0)
        insort(self.running, seq, key=by_arrival)
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_cached
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
            self.stats.num_lookup_tokens += seq.num_tokens
            self.stats.num_cached_tokens += num_cached

    def _queue_followers(self, seq: Sequence) -> None:
        """The prompt of `seq` is computed, so the other samples of its request find it."""
        for follower in self.followers.pop(seq.seq_id):
            insort(self.waiting, follower, key=by_arrival)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.block_manager.deallocate(seq)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=by_arrival)
        self.stats.num_preemptions += 1

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None
    ) -> list[Sequence]:
        """End `seq`, and the followers that cannot go on without the prompt it was to compute."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self.block_manager.deallocate(seq)
        else:
            self._leave_queue(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.error = error
        del self._live[seq.seq_id]
        ended = [seq]
        for follower in tuple(self.followers.get(seq.seq_id, ())):
            ended += self._finish(follower, reason, error)
        return ended

    def _leave_queue(self, seq: Sequence) -> None:
        if seq in self.waiting:
            self.waiting.remove(seq)
            return
        leader_id = next(k for k, followers in self.followers.items() if seq in followers)
        self.followers[leader_id].remove(seq)
        if not self.followers[leader_id]:
            del self.followers[leader_id]
