"""Scenarios of the conformance suite: the reference passes them, and they judge as they say."""

from __future__ import annotations

from typing import Any

import pytest
from bent_door import bent, reference

from nanovllm.conformance.protocol import EngineFault, Hello, Plan, Refused, Unsupported, World
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.scenarios import SCENARIOS, Scenario, run_scenario, run_scenarios
from nanovllm.conformance.scenarios.driver import Bench
from nanovllm.conformance.scenarios.scenario import scenario
from nanovllm.conformance.scenarios.story import Storyteller
from nanovllm.conformance.scenarios.track import small, span
from nanovllm.conformance.transport import open_door
from nanovllm.conformance.verdicts import Evaluations, Outcome, Violation

QUICK_AT_THE_ENGINE = (
    "engine-b12-whole-prompt-in-the-cache",
    "engine-b37-preempted-output-is-complete",
    "engine-b43-total-length-at-max-model-len",
    "engine-b73-stop-string-inside-or-across-tokens",
    "engine-b76-characters-come-whole",
)


def parameters(*doors: str) -> list[Any]:
    return [
        pytest.param(s, id=s.name, marks=pytest.mark.spec(*s.spec_ids))
        for s in SCENARIOS
        if s.door in doors and (s.door != "engine" or s.name in QUICK_AT_THE_ENGINE)
    ]


# ---- the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("one", parameters("blocks", "core"))
def test_the_reference_passes(one: Scenario) -> None:
    result = run_scenario(one, reference())
    if one.lacks:
        assert result.unsupported == tuple(f"no {name}" for name in sorted(one.lacks - {"cow"}))
        return
    assert (result.violation, result.error) == (None, "")
    assert set(one.spec_ids) <= result.evaluations.counts.keys()


@pytest.mark.parametrize("one", parameters("engine"))
def test_the_reference_passes_at_the_engine_door(one: Scenario) -> None:
    with open_door("reference", transport="in-process") as door:
        result = run_scenario(one, door)
        door.close()
    assert (result.violation, result.error) == (None, "")
    assert set(one.spec_ids) <= result.evaluations.counts.keys()


def test_scenarios_are_of_the_registry() -> None:
    registry = load_registry()
    names = [one.name for one in SCENARIOS]
    assert len(set(names)) == len(names)
    for one in SCENARIOS:
        assert one.title != one.name
        for spec_id in one.spec_ids:
            assert not registry[spec_id].ref_only, one.name


# ---- what they convict -------------------------------------------------------------------------


def plan_with(change: Any) -> Any:
    """A bend of `schedule`: each row's block table is changed."""

    def bend(call: Any) -> Plan:
        plan = call()
        rows = tuple(row.__class__(row.id, row.start, row.count, change(row)) for row in plan.rows)
        return Plan(plan.step, rows, plan.preempted)

    return bend


def named(name: str) -> Scenario:
    return next(one for one in SCENARIOS if one.name == name)


def test_reading_another_block_changes_the_output() -> None:
    """A decode row reads the blocks in another order than they were written."""
    door = bent(schedule=plan_with(lambda row: row.block_table[:: -1 if row.count == 1 else 1]))
    bench = Bench(door, small(), Evaluations())
    track = bench.run(span(1, 9), max_tokens=3)
    with pytest.raises(Violation, match="gives alone"):
        bench.expect_alone(track, "KV-1")


def test_a_table_that_is_too_short_is_a_violation() -> None:
    door = bent(schedule=plan_with(lambda row: row.block_table[:-1]))
    with pytest.raises(Violation, match=r"BLK-4: \[0\] has no block for position 4"):
        Bench(door, small(), Evaluations()).run(span(1, 5))


def test_a_request_that_never_ends_breaks_what_it_was_run_for() -> None:
    door = bent(schedule=lambda call: Plan(0))
    with pytest.raises(Violation, match=r"SCH-7d: after \d+ steps"):
        Bench(door, small(), Evaluations()).run([1, 2], spec_id="SCH-7d")


def test_a_block_that_is_held_needlessly_is_found_at_the_boundary() -> None:
    door = bent(schedule=plan_with(lambda row: (*row.block_table, 7)))
    result = run_scenario(named("b06-blocks-at-the-boundary"), door)
    assert result.violation is not None
    assert result.violation.spec_id == "BLK-5"
    assert result.story[-1].startswith("schedule() -> step 0")


def test_a_lost_hit_is_found() -> None:
    """An engine that never caches does no harm, and is convicted all the same."""
    door = bent(world=lambda world: World(world.block_size, world.num_blocks, prefix_cache=False))
    result = run_scenario(named("hit-covers-the-common-full-blocks"), door)
    failed = [verdict.spec_id for verdict in result.verdicts() if verdict.outcome is Outcome.FAIL]
    assert failed == ["PFX-11"]


# ---- what a result says ------------------------------------------------------------------------


class Stub:
    def __init__(self, *capabilities: str) -> None:
        self.capabilities = frozenset(capabilities)

    def hello(self) -> Hello:
        return Hello("stub", "1", ("core",), self.capabilities)


def raising(error: Exception, **options: Any) -> Scenario:
    def example(door: Any, seen: Evaluations) -> None:
        """Raises."""
        seen.count("BLK-1")
        raise error

    return scenario("PFX-6", "BLK-1", **options)(example)


@pytest.mark.parametrize(
    ("error", "message"),
    [(Refused("too long"), "refused: too long"), (EngineFault("died"), "raised: died")],
)
def test_what_the_engine_raises_counts_against_the_main_requirement(
    error: Exception, message: str
) -> None:
    result = run_scenario(raising(error), Stub())
    assert result.violation is not None
    assert (result.violation.spec_id, result.violation.message) == (
        "PFX-6",
        f"the engine {message}",
    )


def test_a_mistake_of_the_harness_is_an_error_and_no_failure() -> None:
    verdicts = run_scenario(raising(KeyError("x")), Stub()).verdicts()
    assert [(v.spec_id, v.outcome) for v in verdicts] == [
        ("PFX-6", Outcome.ERROR),
        ("BLK-1", Outcome.ERROR),
    ]


@pytest.mark.parametrize(
    ("one", "door", "unsupported"),
    [
        (raising(Unsupported("two eos ids")), Stub(), ("two eos ids",)),
        (raising(KeyError(), needs=["salt", "n"]), Stub("n"), ("salt",)),
        (raising(KeyError(), lacks=["n"]), Stub("n"), ("no n",)),
    ],
)
def test_what_is_not_offered_is_no_verdict(
    one: Scenario, door: Stub, unsupported: tuple[str, ...]
) -> None:
    result = run_scenario(one, door)
    assert result.unsupported == unsupported
    assert result.verdicts() == []


def test_a_deviation_from_policy_is_a_remark() -> None:
    one = raising(Violation("PFX-6", "later than others"), level="should")
    found = {v.spec_id: v for v in run_scenario(one, Stub()).verdicts()}
    assert {v.outcome for v in found.values()} == {Outcome.PASS}
    assert found["PFX-6"].message == "[should] later than others"
    assert (found["PFX-6"].evaluations, found["BLK-1"].evaluations) == (0, 1)


def test_a_scenario_has_a_requirement_and_known_capabilities() -> None:
    with pytest.raises(ValueError, match="shows no requirement"):
        scenario()(lambda door, seen: None)
    with pytest.raises(ValueError, match="no such capability: telepathy"):
        scenario("PFX-6", needs=["telepathy"])(lambda door, seen: None)


def test_scenarios_run_one_by_one_at_the_door_they_are_given() -> None:
    chosen = [named("idle-engine-returns-an-empty-plan"), named("length-ends-a-request")]
    doors = [reference(), reference()]
    results = list(run_scenarios(iter(doors).__next__, chosen))
    assert [result.scenario for result in results] == chosen
    assert not any(result.violation for result in results)


# ---- stories -----------------------------------------------------------------------------------


def test_a_story_is_what_was_called_since_the_last_reset() -> None:
    teller = Storyteller(reference())
    teller.reset(small())
    bench = Bench(teller, small(num_blocks=3), Evaluations())
    bench.run([1, 2, 3])
    for _ in range(2):
        bench.schedule()
    teller.pool()
    assert teller.story() == (
        "reset(block_size=4, num_blocks=3)",
        "add(0, [1, 2, 3], 1)",
        "schedule() -> step 0: 0: [0, 3) in [0]",
        "commit(0, {0: 535}) -> [0 ends: length]",
        "schedule() -> nothing, times 2",
    )


def test_of_a_long_story_the_middle_is_left_out() -> None:
    teller = Storyteller(reference())
    bench = Bench(teller, small(), Evaluations())
    for _ in range(20):
        bench.run([1, 2, 3])
    assert len(teller.story()) == 41
    assert teller.story()[20] == "... 21 more calls ..."


def test_a_call_that_raises_is_in_the_story() -> None:
    teller = Storyteller(reference())
    bench = Bench(teller, small(num_blocks=1), Evaluations())
    with pytest.raises(Refused):
        bench.add([1] * 20)
    assert "raises Refused: " in teller.story()[-1]
