"""Steps of an engine as they happen: how long each took, and the state it left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from nanovllm.llm import LLM
from nanovllm.outputs import StepOutput


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that computed something.

    Attributes:
        end: seconds from the start of the recording to the end of the step.
        seconds: wall time of the step.
        device_seconds: of these, what the device was busy for; 0 if the engine does not measure it.
        num_context_tokens: positions that the step's rows attended to, together.
        num_waiting, num_running, num_used_blocks, num_blocks: after the step.
        num_lookup_tokens, num_cached_tokens: totals since the start of the recording, see `Stats`.
    """

    end: float
    seconds: float
    device_seconds: float
    kind: str
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_context_tokens: int
    num_preempted: int
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_blocks: int
    num_lookup_tokens: int
    num_cached_tokens: int

    @property
    def exposed_seconds(self) -> float:
        """Wall time in which the device waited for the host."""
        return max(self.seconds - self.device_seconds, 0.0)


class Recorder:
    """Steps an engine and keeps a record of every step that was not idle."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.records: list[StepRecord] = []
        stats = llm.stats()
        self._lookup, self._cached = stats.num_lookup_tokens, stats.num_cached_tokens
        self._begin = perf_counter()

    @property
    def now(self) -> float:
        """Seconds since the recording began."""
        return perf_counter() - self._begin

    def step(self) -> StepOutput:
        """One step of the engine."""
        begin = self.now
        output = self.llm.step()
        end = self.now
        if output.num_rows:
            self.records.append(self._record(output, begin, end))
        return output

    def run(self) -> list[StepOutput]:
        """Steps until the engine has nothing left to do."""
        outputs = []
        while not self.llm.is_finished():
            outputs.append(self.step())
        return outputs

    def _record(self, output: StepOutput, begin: float, end: float) -> StepRecord:
        stats = self.llm.stats()
        return StepRecord(
            end=end,
            seconds=end - begin,
            device_seconds=output.device_seconds,
            kind=output.kind,
            num_rows=output.num_rows,
            num_prefill_tokens=output.num_prefill_tokens,
            num_decode_tokens=output.num_decode_tokens,
            num_context_tokens=output.num_context_tokens,
            num_preempted=output.num_preempted,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_used_blocks=stats.num_blocks - stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            num_lookup_tokens=stats.num_lookup_tokens - self._lookup,
            num_cached_tokens=stats.num_cached_tokens - self._cached,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; ValueError if none."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
