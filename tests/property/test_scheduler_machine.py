"""Hypothesis wanders through the scheduler; the suite's checks and its shadow KV are the oracle.

The suite draws its own stories, so that an engine can be judged without Hypothesis. This machine
shrinks better, also empties the prefix cache, and shows that the checks hold on other stories.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.checks import CHECKS
from nanovllm.conformance.operations import Add
from nanovllm.conformance.panel import Panel
from nanovllm.conformance.power import SITUATIONS
from nanovllm.conformance.protocol import RequestOptions, World
from nanovllm.conformance.session import Session
from nanovllm.conformance.transport import local_door

EOS = 0
TOKENS = st.sampled_from((1, 2))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """An engine of 2-7 blocks of 1-4 tokens."""
    max_num_seqs = draw(st.sampled_from([2, 1, 3, 4]))
    policy = draw(st.sampled_from(["prefill_first", "mixed"]))
    return World(
        block_size=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(2, 7)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 12)),
        max_model_len=draw(st.sampled_from([40, 12])),
        eos_token_ids=(EOS,),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        hash=draw(st.sampled_from(["real", "real", "constant", "1bit"])),
        options={
            "policy": policy,
            "max_consecutive_prefills": draw(st.sampled_from([8, 1, 2])),
        },
    )


@st.composite
def requests(draw: st.DrawFn) -> Add:
    """All but a number and a prompt; mostly plain."""
    rare = draw(st.integers(0, 5))
    options = RequestOptions(
        ignore_eos=draw(st.booleans()),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        min_tokens=draw(st.integers(1, 4)) if rare == 1 else 0,
        stop_token_ids=(draw(st.sampled_from((EOS, 1, 2))),) if rare == 2 else (),
        salt=draw(st.sampled_from(["red", "blue"])) if rare == 3 else None,
    )
    forced = {draw(st.integers(1, 4)): EOS} if rare == 4 else {}
    return Add(0, (), draw(st.integers(1, 10)), options, draw(st.integers(0, 1)), forced)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps run, fail or stay in flight, requests are aborted."""

    session: Session

    @initialize(world=worlds())
    def start(self, world: World) -> None:
        self.core = ReferenceCore()
        door = local_door(self.core)
        hello = door.hello()
        self.panel = Panel(hello.capabilities)
        self.session = Session(door, hello, world, self.panel)
        self.session.start()

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=12), asked=requests())
    def add(self, prompt: list[int], asked: Add) -> None:
        self._add(prompt, asked)

    @rule(data=st.data(), suffix=st.lists(TOKENS, min_size=1, max_size=4), asked=requests())
    def add_with_shared_prefix(self, data: st.DataObject, suffix: list[int], asked: Add) -> None:
        """A prompt that begins like an earlier sequence, its outputs included."""
        earlier = [[node.token for node in e.path] for e in self.session.book.entries.values()]
        known = data.draw(st.sampled_from(earlier or [[1, 2, 1]]))
        self._add([*known[: data.draw(st.integers(0, len(known)))], *suffix], asked)

    def _add(self, prompt: list[int], asked: Add) -> None:
        """Cut to what the pool holds, so that it is accepted, and blocks are short."""
        prompt = prompt[: self._room - 1]
        max_tokens = min(asked.max_tokens, self._room - len(prompt))
        min_tokens = min(asked.options.min_tokens, max_tokens)
        request = replace(
            asked,
            request=self.session.num_requests,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            options=replace(asked.options, min_tokens=min_tokens),
        )
        assert self.session.add(request)

    @property
    def _room(self) -> int:
        """Tokens of a request, the last of which needs no slot."""
        world = self.session.world
        return min(world.num_blocks * world.block_size + 1, world.max_model_len)

    @rule(excess=st.integers(0, 3), asked=requests())
    def add_what_can_never_run(self, excess: int, asked: Add) -> None:
        prompt = (1,) * (self._room + excess)
        request = replace(asked, request=self.session.num_requests, prompt=prompt)
        assert not self.session.add(request)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.session.step()

    @rule()
    def schedule(self) -> None:
        """Leave a step in flight; with one in flight, nothing more is planned."""
        if self.session.may_schedule:
            self.session.schedule()
        else:
            assert self.core.schedule().rows == ()

    @precondition(lambda self: self.session.book.flights)
    @rule()
    def commit(self) -> None:
        self.session.commit()

    @precondition(lambda self: self.session.book.flights)
    @rule()
    def fail_step(self) -> None:
        self.session.fail_step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Waiting, running, in flight; sometimes finished or unknown."""
        live = sorted({id.request for id in self.session.book.live})
        anyone = st.integers(0, self.session.num_requests)
        self.session.abort(data.draw(st.sampled_from(live) if live else anyone))

    @rule()
    def reset_prefix_cache(self) -> None:
        """Whether what runs then is published afterwards is the engine's choice."""
        self.core.scheduler.reset_prefix_cache()
        self.session.forget_prefixes()

    def teardown(self) -> None:
        """Everything ends within the bound of SCH-6, with the outputs of the oracle."""
        if sys.exc_info()[0] is not None:
            return  # the story has ended already; going on would only hide why
        self.session.drain()
        assert not self.panel.errors, self.panel.errors
        for name in +self.session.book.events:
            event(name)


@pytest.mark.spec(*dict.fromkeys(check.spec_id for check in CHECKS))
def test_every_requirement_holds_and_every_situation_is_reached() -> None:
    """A machine that never preempts shows nothing of preemption."""
    reached: Counter[str] = Counter()

    class Counting(SchedulerMachine):
        def teardown(self) -> None:
            super().teardown()
            reached.update((+self.session.book.events).keys())

    run_state_machine_as_test(Counting, settings=settings())
    least = settings().max_examples // 20
    assert {name: reached[name] for name in SITUATIONS if reached[name] < least} == {}, reached
