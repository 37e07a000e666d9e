"""An engine that plans a step while the one before it runs, so that the host is never waited for.

A second plan takes for granted that the first is executed: its rows count as computed, and a token
that is still to be drawn is known by its place alone. If it turns out to end the request, the row
that was planned behind it is computed for nothing and thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from nanovllm.config import SchedulerConfig
from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.planting import plantings_in
from nanovllm.conformance.protocol import Hello
from nanovllm.conformance.variants.variant import variant
from nanovllm.engine.block_manager import HashFunction
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep, StepBuilder

NOT_DRAWN_YET = -1


@variant
class OneStepAhead(ReferenceCore):
    """A second step is planned before the tokens of the first are known."""

    capabilities = ReferenceCore.capabilities - {"fail_step", "n"}

    def __init__(self, scheduler_class: object = None) -> None:
        super().__init__(_Ahead)

    def hello(self) -> Hello:
        return replace(super().hello(), ahead=1)


class _Ahead(Scheduler):
    def __init__(self, config: SchedulerConfig, hash_function: HashFunction) -> None:
        super().__init__(config, hash_function)
        self.flights: deque[ScheduledStep] = deque()

    def schedule(self) -> ScheduledStep:
        if len(self.flights) > 1:
            return ScheduledStep(self.stats.num_steps)
        for flight in self.flights:
            self._take_for_granted(flight)
        self._in_flight = None
        step = super().schedule()
        if step.rows:
            self.flights.append(step)
        self._note_flights()
        return step

    def commit(
        self,
        step: ScheduledStep,
        token_ids: Mapping[int, int],
        *,
        failed: Mapping[int, str] | None = None,
        stopped: Collection[int] = (),
    ) -> list[Sequence]:
        assert step is self.flights.popleft()
        # A request that ended meanwhile has no use for what was computed ahead of its end.
        useful = replace(step, rows=tuple(row for row in step.rows if not row.seq.is_finished))
        for row in useful.rows:
            if row.seq.token_ids[-1] == NOT_DRAWN_YET and row.end < row.seq.num_tokens:
                row.seq.token_ids.pop()
        self._in_flight = useful
        ended = super().commit(useful, token_ids, failed=failed, stopped=stopped)
        self._note_flights()
        return ended

    def _take_for_granted(self, flight: ScheduledStep) -> None:
        for row in flight.rows:
            seq = row.seq
            if seq.is_finished:
                continue
            samples, seq.num_computed_tokens = row.samples, row.end
            is_last = seq.num_completion_tokens + 1 == seq.max_tokens
            if samples and not is_last and not seq.abort_requested:
                seq.append_token(NOT_DRAWN_YET)

    def _note_flights(self) -> None:
        rows = tuple(row for flight in self.flights for row in flight.rows)
        self._in_flight = ScheduledStep(-1, rows) if rows else None

    def _serve(self, seqs: Collection[Sequence], plan: StepBuilder) -> None:
        super()._serve([seq for seq in seqs if not seq.abort_requested], plan)

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepBuilder) -> bool:
        """Nobody gives way while a step is in flight that may need its blocks."""
        if self.flights and not self.block_manager.can_append(seq, num_tokens):
            return False
        return super()._make_room(seq, num_tokens, plan)


VARIANTS = plantings_in(globals())
