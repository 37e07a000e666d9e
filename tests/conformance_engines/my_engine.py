"""The smallest engine that is right: paged blocks and preemption, no prefix cache, whole prompts.

It has the names that the template of an adapter assumes, so that the two run together unchanged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    tokens: list[int]
    end: int  # tokens at which it is complete
    ignore_eos: bool
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0
    finish_reason: str | None = None


class Scheduler:
    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: list[int],
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens} tokens a step for {max_num_seqs} requests")
        self.block_size, self.num_blocks = block_size, num_blocks
        self.max_num_seqs, self.budget = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.eos_token_ids = max_model_len, eos_token_ids
        self.free = deque(range(num_blocks))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []

    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Request:
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens!r}, not an integer >= 1")
        slots = self.num_blocks * self.block_size
        if not 0 < len(prompt) < self.max_model_len:
            raise ValueError(f"{len(prompt)} tokens; the limit is {self.max_model_len}")
        most = min(max_tokens, self.max_model_len - len(prompt))
        # Preempted, it must compute all but its last token in one step.
        if len(prompt) + most - 1 > min(slots, self.budget):
            raise ValueError(f"{len(prompt)} + {most} tokens; {slots} slots, {self.budget} a step")
        request = Request(list(prompt), len(prompt) + most, ignore_eos)
        self.waiting.append(request)
        return request

    def schedule(self) -> list[Request]:
        self.preempted = []
        return self.prefill() or self.decode()

    def prefill(self) -> list[Request]:
        rows: list[Request] = []
        budget = self.budget
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            needed = -(-len(request.tokens) // self.block_size)
            if len(request.tokens) > budget or needed > len(self.free):
                break
            budget -= len(request.tokens)
            request.num_scheduled = len(request.tokens)
            request.block_table = [self.free.popleft() for _ in range(needed)]
            self.running.append(self.waiting.popleft())
            rows.append(request)
        return rows

    def decode(self) -> list[Request]:
        rows: list[Request] = []
        for request in tuple(self.running):
            if request not in self.running:
                continue
            if request.num_computed == len(request.block_table) * self.block_size:
                if not self.free:
                    self.preempt(self.running[-1])
                if request not in self.running:
                    break
                request.block_table.append(self.free.popleft())
            request.num_scheduled = 1
            rows.append(request)
        return rows

    def preempt(self, request: Request) -> None:
        self.release(request)
        request.num_computed = 0
        self.waiting.appendleft(request)
        self.preempted.append(request)

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.free.extend(request.block_table)
        request.block_table = []

    def commit(self, requests: list[Request], tokens: list[int | None]) -> None:
        for request, token in zip(requests, tokens, strict=True):
            assert token is not None, "there are no chunks"
            request.num_computed += request.num_scheduled
            request.tokens.append(token)
            if token in self.eos_token_ids and not request.ignore_eos:
                request.finish_reason = "stop"
            elif len(request.tokens) == request.end:
                request.finish_reason = "length"
            if request.finish_reason:
                self.release(request)
