"""Sampling at the engine door: greedy, seeds, filters that leave one token, several samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from nanovllm.conformance.protocol import EngineDoor, EngineResult
from nanovllm.conformance.scenarios.engine_driver import (
    TEXTS,
    EngineBench,
    request,
    tokens_of,
)
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.verdicts import Evaluations

engine = partial(scenario, door="engine")
SEEDED = ("sampling", "seed")
A = {"temperature": 0.8, "seed": 42}
MAX_TOKENS = 16


def _batch(bench: EngineBench, *params: dict[str, Any]) -> list[EngineResult]:
    """One prompt under each of these parameters, as one batch."""
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    jobs = [request(TEXTS[0], {**common, **own}) for own in params]
    return [samples[0] for samples in bench.submit(jobs)]


# ---- greedy ------------------------------------------------------------------------------------


@engine("SMP-2", needs=("greedy", "sampling"))
def engine_b63_tiny_temperatures_are_greedy(door: EngineDoor, seen: Evaluations) -> None:
    """1e-8, 1e-5 and 1e-4 give the tokens of 0, without a NaN on the way."""
    bench = EngineBench(door, seen)
    greedy = tokens_of(bench.ask(TEXTS))
    for temperature in (1e-8, 1e-5, 1e-4):
        outputs = bench.ask(TEXTS, temperature=temperature)
        bench.expect_equal("SMP-2", TEXTS, outputs, greedy, f"temperature {temperature}")


@engine("SMP-1", needs=("greedy", "sampling"))
def engine_b64_greedy_rows_beside_sampled_ones(door: EngineDoor, seen: Evaluations) -> None:
    """A batch mixes both; the greedy rows are what they are alone."""
    bench = EngineBench(door, seen)
    alone = tokens_of([bench.ask_one(TEXTS[0])])
    outputs = _batch(bench, {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.0})
    for output in (outputs[0], outputs[2]):
        bench.expect_equal("SMP-1", TEXTS[:1], [output], alone, "beside a sampled row")


def _leaves_one_token(door: EngineDoor, seen: Evaluations, spec_id: str, **params: Any) -> None:
    bench = EngineBench(door, seen)
    greedy = tokens_of(bench.ask(TEXTS))
    outputs = bench.ask(TEXTS, temperature=1.0, **params)
    bench.expect_equal(spec_id, TEXTS, outputs, greedy, f"{params}")


@engine("SMP-3a", needs=("greedy", "sampling", "top_k"))
def top_k_of_one_is_greedy(door: EngineDoor, seen: Evaluations) -> None:
    """At temperature 1."""
    _leaves_one_token(door, seen, "SMP-3a", top_k=1)


@engine("SMP-3b", needs=("greedy", "sampling", "top_p"))
def tiny_top_p_is_greedy(door: EngineDoor, seen: Evaluations) -> None:
    """The smallest set that reaches 1e-6 is the most probable token."""
    _leaves_one_token(door, seen, "SMP-3b", top_p=1e-6)


@engine("SMP-3c", needs=("greedy", "sampling", "min_p"))
def min_p_of_one_is_greedy(door: EngineDoor, seen: Evaluations) -> None:
    """Only the most probable token is as probable as itself."""
    _leaves_one_token(door, seen, "SMP-3c", min_p=1.0)


# ---- seeds -------------------------------------------------------------------------------------


def _expect_same(
    bench: EngineBench, spec_id: str, found: EngineResult, expected: Sequence[int], label: str
) -> None:
    same = found.token_ids == tuple(expected)
    bench.expect(same, spec_id, f"{label}: {found.token_ids}, expected {tuple(expected)}")


@engine("SMP-4", needs=SEEDED)
def engine_b70_seed_decides_whatever_the_batch(door: EngineDoor, seen: Evaluations) -> None:
    """Alone, beside a twin, other seeds and none, first and last, and where blocks are short."""
    bench = EngineBench(door, seen)
    (alone,) = _batch(bench, A)
    b, c = {"temperature": 0.8}, {"temperature": 0.8, "seed": 7}
    for batch in ((A,), (A, A), (A, b), (A, c), (b, b, c, A), (c, b, A, b)):
        found = _batch(bench, *batch)
        for own, output in zip(batch, found, strict=True):
            if own is A:
                label = f"beside {len(batch) - 1} others"
                _expect_same(bench, "SMP-4", output, alone.token_ids, label)
    if bench.try_open(block_size=4, num_blocks=10, max_model_len=36):
        for output in _batch(bench, A, A, A):
            _expect_same(bench, "SMP-4", output, alone.token_ids, "where blocks are short")


@engine("SMP-4", needs=SEEDED)
def seeds_differ_and_no_seed_is_none(door: EngineDoor, seen: Evaluations) -> None:
    """Two seeds, and two requests without one, of 16 tokens at temperature 2."""
    bench = EngineBench(door, seen)
    hot = {"temperature": 2.0}
    outputs = _batch(bench, {**hot, "seed": 1}, {**hot, "seed": 2}, hot, hot)
    again = _batch(bench, hot)
    kinds = {output.token_ids for output in (*outputs, *again)}
    bench.expect(len(kinds) == 5, "SMP-4", f"five draws, only {len(kinds)} outputs: {kinds}")


@engine("SMP-3a", needs=("sampling", "seed", "top_k"))
def top_k_beyond_the_vocabulary_changes_nothing(door: EngineDoor, seen: Evaluations) -> None:
    """The same seed with and without."""
    bench = EngineBench(door, seen)
    plain, wide = _batch(bench, A, {**A, "top_k": 10**6})
    _expect_same(bench, "SMP-3a", wide, plain.token_ids, "top_k=1000000")


@engine("SMP-7", needs=("greedy", "penalties"))
def penalties_survive_preemption(door: EngineDoor, seen: Evaluations) -> None:
    """All three, in an ample pool and where blocks are short."""
    bench = EngineBench(door, seen)
    params = {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
    expected = tokens_of(_batch(bench, params, params, {**params, "presence_penalty": 1.0}))
    if bench.try_open(block_size=4, num_blocks=10, max_model_len=36):
        found = _batch(bench, params, params, {**params, "presence_penalty": 1.0})
        for output, tokens in zip(found, expected, strict=True):
            _expect_same(bench, "SMP-7", output, tokens, "where blocks are short")


# ---- several samples ---------------------------------------------------------------------------


@engine("FRK-1", "FRK-3", needs=(*SEEDED, "n"))
def samples_are_requests_with_derived_seeds(door: EngineDoor, seen: Evaluations) -> None:
    """Sample 0 is the n = 1 request; five samples in two seats are those of five seats."""
    bench = EngineBench(door, seen)
    (alone,) = _batch(bench, A)
    params = {"max_tokens": MAX_TOKENS, **A, "n": 5}
    (samples,) = bench.generate(TEXTS[:1], **params)
    bench.expect(len(samples) == 5, "FRK-3", f"{len(samples)} samples of 5")
    _expect_same(bench, "FRK-1", samples[0], alone.token_ids, "sample 0")
    if bench.try_open(max_num_seqs=2):
        (again,) = bench.generate(TEXTS[:1], **params)
        bench.expect(len(again) == 5, "FRK-3", f"{len(again)} samples of 5 in two seats")
        for i, (sample, first) in enumerate(zip(again, samples, strict=True)):
            _expect_same(bench, "FRK-1", sample, first.token_ids, f"sample {i} in two seats")


SCENARIOS = scenarios_of(globals())
