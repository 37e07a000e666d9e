"""Drives the reference's `Scheduler` itself, with the suite's shadow KV as its model.

The conformance suite judges the scheduler through `CoreDoor`, which hides everything but plans;
this is for tests of what lies behind it. Whatever a row reads must be its own request's history,
so tokens depend on nothing else, and equal outputs mean equal requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nanovllm.config import SchedulerConfig
from nanovllm.conformance.shadow import History, Reading, ShadowKV, Span, next_token
from nanovllm.engine.block_manager import BlockManager, HashFunction, hash_block
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.engine.step import ScheduledRow, ScheduledStep
from nanovllm.sampling_params import SamplingParams

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "num_kvcache_blocks": 8,
    "kvcache_block_size": 4,
    "seed": 0,
}


class Door:
    """A scheduler under test.

    Args:
        hash_function: of the prefix cache.
        alphabet: tokens that the model draws from.
        options: of `SchedulerConfig`, see `DEFAULTS`.
    """

    def __init__(
        self,
        *,
        hash_function: HashFunction = hash_block,
        alphabet: Sequence[int] = (1, 2, 3),
        **options: Any,
    ) -> None:
        self.config = SchedulerConfig(**{**DEFAULTS, **options})
        self.scheduler = Scheduler(self.config, hash_function)
        self.alphabet = tuple(alphabet)
        self.shadow = ShadowKV(self.config.kvcache_block_size)
        self.seqs: list[EngineSequence] = []
        self.roots: dict[str | None, History] = {}

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.block_manager

    @property
    def live(self) -> list[EngineSequence]:
        return [seq for seq in self.seqs if not seq.is_finished]

    @property
    def published(self) -> list[tuple[int, ...]]:
        """Token histories that end with each published block, by block."""
        found = [self.shadow.content(b.block_id) for b in self.blocks.blocks if b.prefix]
        assert None not in found, "a published block is not full of one history"
        return [history.tokens for history in found if history]

    # ---- the calls -------------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], *, salt: str | None = None, **params: Any
    ) -> tuple[EngineSequence, ...]:
        """Queue a request; `params` of `SamplingParams`, by default 4 tokens with seed 0."""
        sampling = SamplingParams(**{"max_tokens": 4, "seed": 0, **params})
        seqs = self.scheduler.add(list(prompt), sampling, salt=salt)
        self.seqs += seqs
        return seqs

    def schedule(self) -> ScheduledStep:
        return self.scheduler.schedule()

    def commit(
        self,
        step: ScheduledStep,
        *,
        forced: Mapping[int, int] | None = None,
        failed: Collection[int] = (),
        stopped: Collection[int] = (),
    ) -> list[EngineSequence]:
        """Execute `step` on the shadow KV, and commit it.

        Args:
            forced: `{seq_id: token}` instead of what the model draws.
            failed: seq_ids whose values are not finite.
            stopped: seq_ids whose text completes a stop string.
        """
        spans = [self._span(row) for row in step.rows]
        tokens: dict[int, int] = {}
        for row, reading in zip(step.rows, self.shadow.execute((), spans), strict=True):
            assert not reading.misreads, f"{row.seq}: {', '.join(map(str, reading.misreads))}"
            if row.samples:
                tokens[row.seq.seq_id] = self._draw(row.seq, reading)
        for row, span in zip(step.rows, spans, strict=True):
            if row.seq.seq_id in failed:
                self.shadow.erase(span)
        causes = dict.fromkeys(failed, "NaN")
        drawn = {**tokens, **(forced or {})}
        return self.scheduler.commit(step, drawn, failed=causes, stopped=stopped)

    def fail_step(self, step: ScheduledStep, cause: str = "out of memory") -> list[EngineSequence]:
        """`step` raised somewhere, so what it was to write is garbage."""
        self.shadow.spoil((), [self._span(row) for row in step.rows])
        return self.scheduler.fail_step(step, cause)

    def abort(self, seq_id: int) -> bool:
        return self.scheduler.abort(seq_id)

    # ---- whole runs ------------------------------------------------------------------------

    def step(self, **outcome: Any) -> ScheduledStep:
        """Schedule and, if there is something to execute, commit."""
        step = self.schedule()
        if step.rows:
            self.commit(step, **outcome)
        return step

    def drain(self) -> list[ScheduledStep]:
        """Run until nothing is left, within the bound of SCH-6."""
        for step in self.scheduler.in_flight:
            self.commit(step)
        live = self.live
        bound = len(live) * (1 + sum(seq.num_prompt_tokens + seq.max_tokens for seq in live))
        steps: list[ScheduledStep] = []
        while self.live:
            assert len(steps) <= bound, f"after {bound} steps, {self.live} are left"
            steps.append(self.step())
        return steps

    def run(self, prompt: Sequence[int], **options: Any) -> tuple[EngineSequence, ...]:
        """Add a request and run until everything has ended."""
        seqs = self.add(prompt, **options)
        self.drain()
        return seqs

    def _span(self, row: ScheduledRow) -> Span:
        node = self.roots.setdefault(row.seq.salt, History.root(row.seq.salt))
        path = [node := node.then(token) for token in row.seq.token_ids]
        return Span(path, row.start, row.end, row.block_table)

    def _draw(self, seq: EngineSequence, reading: Reading) -> int:
        return next_token(reading.digest, seq.params.seed or 0, 0, self.alphabet)
