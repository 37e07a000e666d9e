"""Drives a `Scheduler` with the shadow KV as its model, and checks it after every call.

`Book` is written from what the door sees - prompts, plans, tokens - and from the requirements;
`core_checks` compares it with the plans and with the scheduler's state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from core_book import Book, Entry
from core_checks import check_ended, check_plan, check_state
from shadow_kv import ShadowKV, next_token, require

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import HashFunction, hash_block
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import FinishReason
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.engine.step import ScheduledStep
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
    """A scheduler under test; a call raises `RequirementError` when a requirement does not hold.

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
        self.injected_hash = hash_function is not hash_block
        self.alphabet = tuple(alphabet)
        self.shadow = ShadowKV(self.config.kvcache_block_size)
        self.book = Book(self.config)
        self.pending: ScheduledStep | None = None

    @property
    def blocks(self) -> Any:
        return self.scheduler.block_manager

    # ---- the calls -------------------------------------------------------------------------

    def add(
        self, prompt: Sequence[int], *, salt: str | None = None, **params: Any
    ) -> tuple[EngineSequence, ...]:
        """Queue a request; `params` of `SamplingParams`, by default 4 tokens with seed 0."""
        sampling = SamplingParams(**{"max_tokens": 4, "seed": 0, **params})
        seqs = self.scheduler.add(list(prompt), sampling, salt=salt)
        self.book.add(seqs, tuple(prompt), sampling, salt)
        check_state(self)
        return seqs

    def schedule(self) -> ScheduledStep:
        before = self.book.before(in_flight=self.pending is not None)
        step = self.scheduler.schedule()
        admissions = self.book.plan(step)
        check_plan(self, before, step, admissions)
        if step.rows:
            self.pending = step
        check_state(self)
        return step

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
        entries = [self.book.entries[row.seq.seq_id] for row in step.rows]
        rows = [entry.row(row) for entry, row in zip(entries, step.rows, strict=True)]
        reads = self.shadow.execute(rows)
        self.shadow.spoil(r for e, r in zip(entries, rows, strict=True) if e.seq_id in failed)
        tokens: dict[int, int] = {}
        for entry, read in zip(entries, reads, strict=True):
            if len(read.tokens) == len(entry.tokens) and entry.seq_id not in failed:
                tokens[entry.seq_id] = self._draw(entry, read.tokens, forced or {})
        causes = dict.fromkeys(failed, "NaN")
        ended = self.scheduler.commit(step, tokens, failed=causes, stopped=stopped)
        self.pending = None
        expected: list[Entry] = []
        for row in step.rows:
            i = row.seq.seq_id
            expected += self.book.commit_row(row, tokens.get(i), i in failed, i in stopped)
        check_ended(self, ended, expected)
        check_state(self)
        return ended

    def fail_step(self, step: ScheduledStep, cause: str = "out of memory") -> list[EngineSequence]:
        """`step` raised somewhere, so what it was to write is garbage."""
        entries = [self.book.entries[row.seq.seq_id] for row in step.rows]
        self.shadow.spoil(e.row(row) for e, row in zip(entries, step.rows, strict=True))
        ended = self.scheduler.fail_step(step, cause)
        self.pending = None
        expected = [e for entry in entries for e in self.book.end(entry, FinishReason.ERROR)]
        check_ended(self, ended, expected)
        check_state(self)
        return ended

    def abort(self, seq_id: int) -> bool:
        entry = self.book.entries.get(seq_id)
        took = self.scheduler.abort(seq_id)
        alive = entry is not None and entry.reason is None and not entry.aborting
        require(took is alive, "SCH-13", "abort of", entry or seq_id, "says", took)
        if entry is not None and alive:
            if self.pending and any(row.seq is entry.seq for row in self.pending.rows):
                entry.aborting = True
            else:
                self.book.end(entry, FinishReason.ABORT)
        check_state(self)
        return took

    def reset_prefix_cache(self) -> None:
        self.blocks.reset_prefix_cache()
        self.book.published.clear()
        check_state(self)

    # ---- whole runs ------------------------------------------------------------------------

    def step(self, **outcome: Any) -> ScheduledStep:
        """Schedule and, if there is something to execute, commit."""
        step = self.schedule()
        if step.rows:
            self.commit(step, **outcome)
        return step

    def drain(self) -> list[ScheduledStep]:
        """Run until nothing is left, within the bound of SCH-6."""
        if self.pending:
            self.commit(self.pending)
        live = self.book.live
        work = sum(len(entry.prompt) + entry.max_tokens for entry in live)
        bound = len(live) * work + len(live)
        steps: list[ScheduledStep] = []
        while self.book.live:
            require(
                len(steps) <= bound, "SCH-6", "after", bound, "steps", self.book.live, "are left"
            )
            steps.append(self.step())
        return steps

    def run(self, prompt: Sequence[int], **options: Any) -> tuple[EngineSequence, ...]:
        """Add a request and run until everything has ended."""
        seqs = self.add(prompt, **options)
        self.drain()
        return seqs

    def _draw(self, entry: Entry, read: tuple[int, ...], forced: Mapping[int, int]) -> int:
        if entry.seq_id in forced and not entry.aborting:
            entry.forced[len(entry.completion)] = forced[entry.seq_id]
            return forced[entry.seq_id]
        return next_token(read, entry.params.seed or 0, self.alphabet)
