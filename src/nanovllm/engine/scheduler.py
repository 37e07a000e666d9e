"""Continuous batching: who computes which positions next, and what a sampled token ends (SCH, FRK).

There is no prefill phase and no decode phase, only tokens known and tokens computed. A policy is an
order of two moves: *serve* running sequences (each continues where it stopped) and *admit* waiting
ones. The queues are those of `RequestQueues`, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import HashFunction, hash_block
from nanovllm.engine.request_queues import RequestQueues
from nanovllm.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledStep, StepBuilder


class Scheduler(RequestQueues):
    """Plans and their outcomes; pure Python, no tensors.

    Args:
        config: limits, policy, end-of-sequence ids.
        hash_function: see `BlockManager`; for tests.

    Call `schedule`, execute the step, then `commit` or `fail_step` it. With
    `config.max_steps_in_flight` steps outstanding `schedule` returns an empty step (SCH-5).

    With more than one, a plan takes for granted that those in flight are executed: their positions
    count as computed, and the token that one will draw is known by its place. If it turns out to
    end the request, the row planned behind it is computed for nothing and discarded; its blocks are
    given back at once, which is safe as long as steps execute in order. Nobody is preempted while a
    step is in flight that may use the victim's blocks.
    """

    def __init__(self, config: SchedulerConfig, hash_function: HashFunction = hash_block) -> None:
        super().__init__(config, hash_function)
        self._flights: list[ScheduledStep] = []
        # Blocks ran short while steps were in flight: plan no more until they have landed.
        self._must_land = False
        self._prefill_streak = 0
        policies: dict[str, Callable[[StepBuilder], None]] = {
            "prefill_first": self._plan_prefill_first,
            "mixed": self._plan_mixed,
        }
        self._plan = policies[config.policy]

    def abort(self, seq_id: int) -> bool:
        """End a live sequence; False if it is unknown or has ended (SCH-13).

        One that is part of a step in flight ends when that step is committed.
        """
        seq = self._live.get(seq_id)
        if seq is None or seq.abort_requested:
            return False
        if any(row.seq is seq for step in self._flights for row in step.rows):
            seq.abort_requested = True
        else:
            self._finish(seq, FinishReason.ABORT)
        return True

    @property
    def in_flight(self) -> tuple[ScheduledStep, ...]:
        """The steps that are neither committed nor failed yet, in order."""
        return tuple(self._flights)

    # ---- the plan --------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Plan the next step; empty when there is nothing to do, or enough in flight (SCH-5)."""
        plan = StepBuilder(self.config.max_num_batched_tokens)
        self._must_land = self._must_land and bool(self._flights)
        if len(self._flights) < self.config.max_steps_in_flight and not self._must_land:
            self._plan(plan)
        step = plan.build(self.stats.num_steps)
        if step.rows:
            self._take_off(step)
        return step

    def _take_off(self, step: ScheduledStep) -> None:
        self._flights.append(step)
        self.stats.num_steps += 1
        for row in step.rows:
            row.seq.num_in_flight_tokens += row.count
            row.seq.num_pending_tokens += row.samples

    def _require_in_flight(self, step: ScheduledStep) -> None:
        if not self._flights or step is not self._flights[0]:
            raise ValueError(f"step {step.step_id} is not the one in flight")

    def _land(self, step: ScheduledStep) -> None:
        self._flights.remove(step)
        for row in step.rows:
            row.seq.num_in_flight_tokens -= row.count
            row.seq.num_pending_tokens -= row.samples

    def _plan_mixed(self, plan: StepBuilder) -> None:
        self._serve(self.running, plan)
        self._admit(plan)

    def _plan_prefill_first(self, plan: StepBuilder) -> None:
        """Prompts first, but at most `max_consecutive_prefills` such steps while a decode waits."""
        counts = [(seq, seq.num_unscheduled_tokens) for seq in self.running]
        decoding = [seq for seq, count in counts if count == 1]
        if not decoding:
            self._prefill_streak = 0
        if self._prefill_streak < self.config.max_consecutive_prefills:
            self._serve([seq for seq, count in counts if count > 1], plan)
            self._admit(plan)
        if plan.rows:
            self._prefill_streak += 1
        else:
            self._prefill_streak = 0
            self._serve(decoding, plan)
        if plan.preempted and not plan.rows:
            # The only decode was the newest and gave way, so an older prompt goes on.
            self._serve(self.running, plan)

    def _serve(self, seqs: Seq[Sequence], plan: StepBuilder) -> None:
        """Continue `seqs`, oldest first: a token each for decodes, chunks into what they leave."""
        counts = [seq.num_unscheduled_tokens for seq in seqs]
        decodes_left = counts.count(1)
        for seq, count in zip(tuple(seqs), counts, strict=True):
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted by an older one a moment ago
            if count == 1:
                decodes_left -= 1
            elif count > plan.budget - decodes_left:
                count = plan.budget - decodes_left
            end = seq.num_computed_tokens + seq.num_in_flight_tokens + count
            if count and self._make_room(seq, end, plan):
                plan.add(seq, count)

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepBuilder) -> bool:
        """Grow the table of `seq`, preempting others while blocks are short (SCH-8).

        False if it gave way itself. The oldest alone always has room: `validate` saw to that.
        """
        blocks = self.block_manager
        if num_tokens <= len(seq.block_table) * blocks.block_size:
            return True
        while not blocks.can_append(seq, num_tokens):
            if self._flights:
                self._must_land = True
                return False
            victim = self._victim(seq, plan)
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is seq:
                return False
        blocks.may_append(seq, num_tokens)
        return True

    def _victim(self, seq: Sequence, plan: StepBuilder) -> Sequence:
        """Who gives way to `seq`, maybe `seq` itself: the newest.

        Rows are planned oldest first, so the newest never has a row in this plan yet.
        """
        return self.running[-1]

    def _admit(self, plan: StepBuilder) -> None:
        """First come, first served, while there are seats, budget and blocks for all known tokens.

        The blocks beyond the first chunk are not reserved: a chunk is cut only where it exhausts
        the budget, so nobody else is admitted before it is complete.
        """
        while (
            self.waiting
            and not plan.preempted
            and not self._must_land
            and plan.budget
            and len(self.running) < self.config.max_num_seqs
        ):
            seq = self.waiting[0]
            hits = self.block_manager.lookup(seq)
            if not self.block_manager.can_allocate(hits, seq.num_tokens):
                return
            num_cached = len(hits) * self.config.kvcache_block_size
            count = min(seq.num_tokens - num_cached, plan.budget)
            self.block_manager.allocate(seq, hits, num_cached + count)
            self._start(seq, num_cached)
            plan.add(seq, count)

    # ---- its outcome -----------------------------------------------------------------------

    def commit(
        self,
        step: ScheduledStep,
        token_ids: Mapping[int, int],
        *,
        failed: Mapping[int, str] | None = None,
        stopped: Collection[int] = (),
    ) -> list[Sequence]:
        """Apply an executed step; returns the sequences that ended, in row order.

        Args:
            step: what `schedule` returned last.
            token_ids: `{seq_id: sampled token}` for every row with `samples`.
            failed: `{seq_id: cause}`; these end with reason `error` and publish nothing (SMP-5).
            stopped: seq_ids whose text completed a stop string with this token (SCH-12c).
        """
        self._require_in_flight(step)
        failed = failed or {}
        ended: list[Sequence] = []
        for row in step.rows:
            seq = row.seq
            if seq.is_finished:
                continue  # by the step before: the row was computed for nothing
            if seq.abort_requested:
                ended += self._finish(seq, FinishReason.ABORT)
            elif seq.seq_id in failed:
                ended += self._finish(seq, FinishReason.ERROR, failed[seq.seq_id])
            else:
                seq.num_computed_tokens = row.end
                self.block_manager.publish(seq, row.start, row.end)
                if not row.samples:
                    continue
                reason = self._append(seq, token_ids[seq.seq_id], seq.seq_id in stopped)
                if reason:
                    ended += self._finish(seq, reason)
        self.stats.num_computed_tokens += step.num_tokens
        self._land(step)
        return ended

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        """The step raised: its sequences end with reason `error`, all others go on (SCH-15).

        It may have been committed in part, if it was `commit` that raised.
        """
        self._require_in_flight(step)
        ended: list[Sequence] = []
        for row in step.rows:
            if not row.seq.is_finished:
                ended += self._finish(row.seq, FinishReason.ERROR, cause)
        self._land(step)
        return ended

    def fail_all(self, cause: str) -> None:
        """No step can run any more: everything ends with reason `error` (TP-4)."""
        for step in self.in_flight:
            self.fail_step(step, cause)
        while self._live:
            self._finish(next(iter(self._live.values())), FinishReason.ERROR, cause)

    def _append(self, seq: Sequence, token_id: int, stopped: bool) -> FinishReason | None:
        """Append a sampled token; the reason if it is the last one, `stop` before `length`."""
        if seq.seq_id in self.followers:
            self._queue_followers(seq)
        seq.append_token(token_id)
        if stopped or self._is_stop_token(seq, token_id):
            return FinishReason.STOP
        if seq.num_completion_tokens == seq.max_tokens:
            return FinishReason.LENGTH
        return None

    def _is_stop_token(self, seq: Sequence, token_id: int) -> bool:
        params = seq.params
        is_eos = token_id in self.config.eos_token_ids and not params.ignore_eos
        if not is_eos and token_id not in params.stop_token_ids:
            return False
        return seq.num_completion_tokens > params.min_tokens
