"""A state machine over scheduler and blocks; the door checks every requirement after every call."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from core_door import Door
from core_world import EOS, doors, params, prompts
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps run, fail or stay in flight, requests are aborted."""

    door: Door

    @initialize(door=doors())
    def start(self, door: Door) -> None:
        self.door = door

    @rule(prompt=prompts, options=params())
    def add(self, prompt: list[int], options: dict[str, Any]) -> None:
        self._add(prompt, options)

    @rule(data=st.data(), suffix=st.lists(st.sampled_from((1, 2)), max_size=4), options=params())
    def add_with_shared_prefix(
        self, data: st.DataObject, suffix: list[int], options: dict[str, Any]
    ) -> None:
        """A prompt that begins like an earlier sequence, its completion included."""
        earlier = [entry.tokens for entry in self.door.book.entries.values()] or [[1, 2, 1]]
        known = data.draw(st.sampled_from(earlier))
        self._add([*known[: data.draw(st.integers(0, len(known)))], *suffix], options)

    def _add(self, prompt: list[int], options: dict[str, Any]) -> None:
        """Cut to what the pool holds, so that it is accepted, and blocks are short."""
        prompt = prompt[: min(self._slots, self.door.config.max_model_len - 1)] or [1]
        if options["max_tokens"] is not None:
            options["max_tokens"] = min(options["max_tokens"], self._slots - len(prompt) + 1)
            options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
        self.door.add(prompt, **options)

    @rule(excess=st.integers(1, 3), max_tokens=st.integers(1, 3))
    def add_what_can_never_run(self, excess: int, max_tokens: int) -> None:
        longest = min(self._slots - max_tokens + 1, self.door.config.max_model_len - 1)
        p = max(longest, 0) + excess
        if p < self.door.config.max_model_len <= p + max_tokens:
            return  # max_tokens is cut to the model's length, so it may fit
        with pytest.raises(ValueError, match=f"{p} "):
            self.door.add([1] * p, max_tokens=max_tokens)

    @property
    def _slots(self) -> int:
        return self.door.config.num_kvcache_blocks * self.door.config.kvcache_block_size

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        if self.door.pending:
            self.door.commit(self.door.pending)
        for _ in range(count):
            self.door.step()

    @rule()
    def schedule(self) -> None:
        """Leave a step in flight; with one in flight, nothing more is planned."""
        self.door.schedule()

    @precondition(lambda self: self.door.pending)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Some rows draw eos, complete a stop string, or have no finite logits."""
        rows = st.sampled_from([row.seq.seq_id for row in self.door.pending.rows])
        kinds = st.sampled_from(["eos", "stop string", "NaN"])
        outcome = data.draw(st.dictionaries(rows, kinds))
        sampling = {row.seq.seq_id for row in self.door.pending.rows if row.samples}
        self.door.commit(
            self.door.pending,
            forced={i: EOS for i, kind in outcome.items() if kind == "eos"},
            stopped={i for i, kind in outcome.items() if kind == "stop string" and i in sampling},
            failed={i for i, kind in outcome.items() if kind == "NaN"},
        )

    @precondition(lambda self: self.door.pending)
    @rule()
    def fail_step(self) -> None:
        self.door.fail_step(self.door.pending)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Waiting, running, in flight; sometimes finished or unknown."""
        live = [entry.seq_id for entry in self.door.book.live]
        any_id = st.integers(0, len(self.door.book.entries))
        self.door.abort(data.draw(st.sampled_from(live) if live else any_id))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.door.reset_prefix_cache()

    def teardown(self) -> None:
        """Everything ends within the bound of SCH-6, with the outputs of the oracle."""
        if sys.exc_info()[0] is not None:
            return  # the story has ended already; going on would only hide why
        self.door.drain()
        for name in +self.door.book.events:
            event(name)


JUDGED = (
    *("SEQ-2", "SEQ-3", "SEQ-5"),
    *("BLK-1", "BLK-2", "BLK-4", "BLK-5", "BLK-8"),
    *("PFX-2", "PFX-3", "PFX-4", "PFX-5", "PFX-6", "PFX-7", "PFX-8", "PFX-9", "PFX-10", "PFX-11"),
    *("PFX-12", "PFX-14", "PFX-16", "PFX-17"),
    *("SCH-1", "SCH-2", "SCH-3", "SCH-4", "SCH-5", "SCH-6", "SCH-7a", "SCH-7d", "SCH-8", "SCH-9"),
    *("SCH-10", "SCH-11", "SCH-12a", "SCH-12b", "SCH-12c", "SCH-12d", "SCH-13", "SCH-14", "SCH-15"),
    *("SCH-16", "FRK-1", "FRK-2", "FRK-3", "KV-5", "KV-7", "STP-2"),
)
TestScheduler = pytest.mark.spec(*JUDGED)(SchedulerMachine.TestCase)
