"""SCH-8..15: preemption, aborts, prompts in pieces, failed steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nanovllm.conformance.faults.fault import planted
from nanovllm.conformance.planting import plantings_in
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledStep, StepBuilder


def leak(blocks: BlockManager, seq: Sequence) -> None:
    """Its blocks stay referenced when it lets go of them."""
    for block_id in seq.block_table:
        blocks.blocks[block_id].ref_count += 1


# ---- preemption ----------------------------------------------------------------------------------


@planted("SCH-8")
class OldestGivesWay(Scheduler):
    """The newest request is served first, and the oldest is preempted for it."""

    def _victim(self, seq: Sequence, plan: StepBuilder) -> Sequence:
        return self.running[0]

    def _serve(self, seqs: Collection[Sequence], plan: StepBuilder) -> None:
        super()._serve(tuple(seqs)[::-1], plan)


@planted("SCH-8")
class VictimKeepsItsRow(Scheduler):
    """Who is preempted may have a row in the plan already, and keeps it."""

    def _serve(self, seqs: Collection[Sequence], plan: StepBuilder) -> None:
        super()._serve(tuple(seqs)[::-1], plan)


@planted("SCH-9")
class OutputsBecomePrompt(Scheduler):
    """After a preemption generated tokens count as prompt, so that the limit begins anew."""

    def _preempt(self, seq: Sequence) -> None:
        super()._preempt(seq)
        seq.num_prompt_tokens = seq.num_tokens


@planted("SCH-9")
class OutputsAreForgotten(Scheduler):
    """A preempted request starts over from its prompt."""

    def _preempt(self, seq: Sequence) -> None:
        super()._preempt(seq)
        del seq.token_ids[seq.num_prompt_tokens :]


@planted("SCH-11", door="unit")
class NewcomersGoToTheFront(Scheduler):
    """Who is admitted takes the first place in the batch, and everybody else moves."""

    def _start(self, seq: Sequence, num_cached: int) -> None:
        super()._start(seq, num_cached)
        self.running.remove(seq)
        self.running.insert(0, seq)


# ---- aborts --------------------------------------------------------------------------------------


@planted("SCH-13")
class AbortLeaksBlocks(Scheduler):
    """An aborted request leaves the batch and its blocks stay behind."""

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None
    ) -> list[Sequence]:
        if reason is FinishReason.ABORT and seq.status is SequenceStatus.RUNNING:
            leak(self.block_manager, seq)
        return super()._finish(seq, reason, error)


@planted("SCH-13")
class AbortAlwaysTakes(Scheduler):
    """Aborting what has ended, or never was, is told as a success."""

    def abort(self, seq_id: int) -> bool:
        super().abort(seq_id)
        return True


@planted("SCH-13")
class AbortForgetsTheQueue(Scheduler):
    """Only running requests are looked through, so one that waits runs all the same."""

    def abort(self, seq_id: int) -> bool:
        seq = self._live.get(seq_id)
        if seq is not None and seq.status is SequenceStatus.WAITING:
            return True
        return super().abort(seq_id)


@planted("SCH-13")
class AbortInFlightIsLost(Scheduler):
    """An abort that comes between plan and commit is overwritten by the commit."""

    def commit(
        self,
        step: ScheduledStep,
        token_ids: Mapping[int, int],
        *,
        failed: Mapping[int, str] | None = None,
        stopped: Collection[int] = (),
    ) -> list[Sequence]:
        for row in step.rows:
            row.seq.abort_requested = False
        return super().commit(step, token_ids, failed=failed, stopped=stopped)


# ---- prompts in pieces ---------------------------------------------------------------------------


class ChunkAware(Scheduler):
    """Calls `after_chunk` for each sequence of which a step computed a piece and drew nothing."""

    def after_chunk(self, seq: Sequence) -> None:
        raise NotImplementedError

    def commit(
        self,
        step: ScheduledStep,
        token_ids: Mapping[int, int],
        *,
        failed: Mapping[int, str] | None = None,
        stopped: Collection[int] = (),
    ) -> list[Sequence]:
        chunks = [row.seq for row in step.rows if not row.samples]
        ended = super().commit(step, token_ids, failed=failed, stopped=stopped)
        for seq in chunks:
            if not seq.is_finished:
                self.after_chunk(seq)
        return ended


@planted("SCH-14", instead_of=Scheduler)
class ChunksCountAsOutputs(ChunkAware):
    """Every committed row counts as an output, also one that draws nothing."""

    def after_chunk(self, seq: Sequence) -> None:
        seq.max_tokens = max(1, seq.max_tokens - 1)


@planted("KV-5", instead_of=Scheduler)
class NextChunkLeavesOneOut(ChunkAware):
    """A chunk begins one position after the end of the previous one."""

    def after_chunk(self, seq: Sequence) -> None:
        seq.num_computed_tokens = min(seq.num_computed_tokens + 1, seq.num_tokens - 1)


# ---- failed steps --------------------------------------------------------------------------------


@planted("SCH-15")
class FailedStepLeaksBlocks(Scheduler):
    """The requests of a step that raised end, and their blocks stay behind."""

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        for row in step.rows:
            leak(self.block_manager, row.seq)
        return super().fail_step(step, cause)


@planted("SCH-15")
class FailedStepEndsEverybody(Scheduler):
    """One step that raises ends all requests, also those that were not in it."""

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        ended = super().fail_step(step, cause)
        for seq in tuple(self._live.values()):
            if not seq.is_finished:
                ended += self._finish(seq, FinishReason.ERROR, cause)
        return ended


@planted("SCH-15")
class FailedStepStaysInFlight(Scheduler):
    """A step that raised counts as running, so nothing is planned any more."""

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        ended = super().fail_step(step, cause)
        self._flights.append(step)
        return ended


@planted("SCH-15")
class FailedStepRestoresTooMuch(Scheduler):
    """Requests of a step that raised are put back as if it had been computed."""

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        self._land(step)
        for row in step.rows:
            row.seq.num_computed_tokens = min(row.end, row.seq.num_tokens - 1)
        return []


FAULTS = plantings_in(globals())
