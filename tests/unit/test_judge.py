"""From the verdicts of the parts to one for each requirement."""

import pytest

from nanovllm.conformance.judge import block, complete, merge
from nanovllm.conformance.protocol import Hello
from nanovllm.conformance.registry import Requirement, load_registry
from nanovllm.conformance.verdicts import Outcome, Verdict

REGISTRY = load_registry()
CORE = Hello("toy", "1", ("core",), frozenset({"prefix_cache"}))


def selected(*ids: str) -> dict[str, Requirement]:
    return {spec_id: REGISTRY[spec_id] for spec_id in ids}


def outcome(spec_id: str, *parts: Verdict, hello: Hello = CORE) -> Outcome:
    return complete(selected(spec_id), merge(parts), hello)[spec_id].outcome


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([Outcome.PASS, Outcome.FAIL, Outcome.PASS], Outcome.FAIL),
        ([Outcome.ERROR, Outcome.PASS], Outcome.ERROR),
        ([Outcome.FAIL, Outcome.ERROR], Outcome.FAIL),
        ([Outcome.NOT_EXERCISED, Outcome.PASS], Outcome.PASS),
        ([Outcome.UNSUPPORTED, Outcome.NOT_EXERCISED], Outcome.NOT_EXERCISED),
    ],
)
def test_the_gravest_outcome_wins_in_any_order(parts: list[Outcome], expected: Outcome) -> None:
    verdicts = [Verdict("SCH-2", part, 1) for part in parts]
    assert merge(verdicts)["SCH-2"].outcome is expected
    assert merge(reversed(verdicts))["SCH-2"].outcome is expected


def test_evaluations_and_tests_add_up_and_the_shortest_story_is_told() -> None:
    merged = merge(
        [
            Verdict("SCH-2", Outcome.PASS, 10, tests=("a",)),
            Verdict("SCH-2", Outcome.FAIL, 2, "long", ("1", "2", "3"), {}, tests=("b",)),
            Verdict("SCH-2", Outcome.FAIL, 3, "short", ("1", "2"), {}, tests=("a", "c")),
        ]
    )["SCH-2"]
    assert (merged.evaluations, merged.message, merged.tests) == (15, "short", ("a", "b", "c"))


def test_what_nobody_judged_is_not_exercised() -> None:
    assert outcome("SCH-2") is Outcome.NOT_EXERCISED
    assert outcome("SCH-2", Verdict("SCH-2", Outcome.PASS, 0)) is Outcome.NOT_EXERCISED
    assert outcome("SCH-2", Verdict("SCH-2", Outcome.PASS, 1)) is Outcome.PASS


def test_what_is_not_declared_is_unsupported_and_says_what_lacks() -> None:
    verdicts = complete(selected("PFX-7", "PFX-14", "MOD-1"), {}, CORE)
    assert {v.outcome for v in verdicts.values()} == {Outcome.UNSUPPORTED}
    assert verdicts["PFX-7"].message == "does not declare pool"
    assert verdicts["PFX-14"].message == "does not declare salt"
    assert verdicts["MOD-1"].message == "has no door engine"


def test_an_undeclared_capability_is_not_held_against_an_engine() -> None:
    assert outcome("PFX-14", Verdict("PFX-14", Outcome.FAIL, 1)) is Outcome.UNSUPPORTED


# PFX-11 needs PFX-2 and PFX-8.
@pytest.mark.parametrize(
    ("need", "own", "expected"),
    [
        (Outcome.FAIL, Outcome.FAIL, Outcome.BLOCKED),
        (Outcome.FAIL, Outcome.NOT_EXERCISED, Outcome.BLOCKED),
        (Outcome.FAIL, Outcome.PASS, Outcome.PASS),
        (Outcome.FAIL, Outcome.UNSUPPORTED, Outcome.UNSUPPORTED),
        (Outcome.KNOWN_FAIL, Outcome.FAIL, Outcome.FAIL),
        (Outcome.KNOWN_FAIL, Outcome.NOT_EXERCISED, Outcome.BLOCKED),
        (Outcome.PASS, Outcome.FAIL, Outcome.FAIL),
    ],
)
def test_a_failed_need_blocks(need: Outcome, own: Outcome, expected: Outcome) -> None:
    found = {"PFX-2": Verdict("PFX-2", need, 1), "PFX-11": Verdict("PFX-11", own, 1, "cached 0")}
    blocked = block(REGISTRY, found)
    assert blocked["PFX-11"].outcome is expected
    if expected is Outcome.BLOCKED:
        assert "needs PFX-2, which fails" in blocked["PFX-11"].message
        assert ("cached 0" in blocked["PFX-11"].message) is (own is Outcome.FAIL)
    assert blocked["PFX-2"] == found["PFX-2"]


def test_needs_of_needs_block_too() -> None:
    # FRK-1 needs SMP-4, which needs MOD-2.
    found = {
        "FRK-1": Verdict("FRK-1", Outcome.NOT_EXERCISED),
        "MOD-2": Verdict("MOD-2", Outcome.FAIL, 1),
    }
    assert block(REGISTRY, found)["FRK-1"].outcome is Outcome.BLOCKED
