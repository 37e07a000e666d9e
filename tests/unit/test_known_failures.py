"""Failures that are known: excused while they are true, accused when they are stale."""

import tomllib
from datetime import date
from pathlib import Path

import pytest

from nanovllm.conformance.known_failures import (
    KnownFailure,
    apply_known,
    load_known_failures,
    replay_known,
    write_known_failures,
)
from nanovllm.conformance.registry import load_registry
from nanovllm.conformance.verdicts import Outcome, Verdict

TODAY = date(2026, 6, 1)
TRACE = {"world": {"block_size": 2}, "operations": [{"op": "add", "prompt": [1]}]}
FAILS = Verdict("PFX-9", Outcome.FAIL, 4, "evicts the newest", ("add",), TRACE)
PASSES = Verdict("PFX-9", Outcome.PASS, 9)


def known(**fields: object) -> dict[str, KnownFailure]:
    return {"PFX-9": KnownFailure.from_toml("PFX-9", {"reason": "reported", **fields})}


def judged(entries: dict[str, KnownFailure], verdict: Verdict, *replayed: Verdict) -> Verdict:
    return apply_known(entries, {"PFX-9": verdict}, {v.spec_id: v for v in replayed}, TODAY)[
        "PFX-9"
    ]


def load(path: Path, text: str) -> dict[str, KnownFailure]:
    path.write_text(text)
    return load_known_failures(path, load_registry())


# ---- what an entry does ------------------------------------------------------------------------


def test_a_failure_that_is_known_is_excused_with_its_reason() -> None:
    verdict = judged(known(kind="policy", url="https://example.org/1"), FAILS)
    assert verdict.outcome is Outcome.KNOWN_FAIL
    assert verdict.message == "evicts the newest; policy: reported (https://example.org/1)"
    assert verdict.evaluations == 4


def test_an_entry_that_passes_is_an_error() -> None:
    assert judged(known(), PASSES).outcome is Outcome.UNEXPECTED_PASS


@pytest.mark.parametrize("outcome", [Outcome.NOT_EXERCISED, Outcome.UNSUPPORTED, Outcome.BLOCKED])
def test_an_entry_that_matches_nothing_is_an_error(outcome: Outcome) -> None:
    verdict = judged(known(), Verdict("PFX-9", outcome))
    assert verdict.outcome is Outcome.UNEXPECTED_PASS
    assert str(outcome) in verdict.message


def test_a_trace_that_still_fails_excuses_a_run_that_did_not_meet_it() -> None:
    verdict = judged(known(trace="{}"), PASSES, FAILS)
    assert verdict.outcome is Outcome.KNOWN_FAIL
    assert verdict.evaluations == 9
    assert verdict.trace == TRACE


def test_a_trace_that_passes_is_stale_even_if_the_run_fails_otherwise() -> None:
    verdict = judged(known(trace="{}"), FAILS, PASSES)
    assert verdict.outcome is Outcome.UNEXPECTED_PASS
    assert "evicts the newest" in verdict.message


def test_an_entry_excuses_only_until_its_day() -> None:
    assert judged(known(until=date(2026, 6, 2)), FAILS).outcome is Outcome.KNOWN_FAIL
    expired = judged(known(until=TODAY), FAILS)
    assert expired.outcome is Outcome.FAIL
    assert "only until 2026-06-01" in expired.message


def test_an_error_of_the_harness_is_never_excused() -> None:
    error = Verdict("PFX-9", Outcome.ERROR, message="KeyError")
    assert judged(known(), error) == error
    assert judged(known(trace="{}"), FAILS, error) == error


def test_other_requirements_are_untouched() -> None:
    other = Verdict("PFX-8", Outcome.FAIL, 1)
    assert apply_known(known(), {"PFX-8": other}, {}, TODAY) == {"PFX-8": other}


def test_traces_of_selected_entries_are_replayed() -> None:
    entries = known(trace='{"operations": []}') | {"PFX-8": KnownFailure("PFX-8", "no trace")}
    asked = []

    def replay(trace: dict[str, object], spec_id: str) -> Verdict:
        asked.append((spec_id, trace))
        return FAILS

    assert replay_known(entries, ["PFX-8", "PFX-9", "BLK-1"], replay) == {"PFX-9": FAILS}
    assert asked == [("PFX-9", {"operations": []})]
    assert replay_known(entries, ["PFX-8"], replay) == {}


# ---- the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =", "known.toml: Invalid value"),
        ('["PFX-99"]\nreason = "r"', "no requirement is called PFX-99"),
        ('"PFX-9" = 3', "PFX-9: must be a table"),
        ('["PFX-9"]\nkind = "bug"', "PFX-9: needs a reason"),
        ('["PFX-9"]\nreason = "r"\nkind = "flaky"', "'flaky' is none of bug"),
        ('["PFX-9"]\nreason = "r"\nbecause = "b"', "PFX-9: unknown because"),
        ('["PFX-9"]\nreason = "r"\nuntil = "soon"', "'soon' is no date"),
        ('["PFX-9"]\nreason = "r"\ntrace = "{"', "PFX-9: trace is not JSON"),
    ],
)
def test_a_malformed_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "known.toml", text)


def test_what_fails_is_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    nasty = "quotes \" ''' \\ \n newline \x7f é"
    fails = [FAILS, Verdict("PFX-8", Outcome.FAIL, 1, nasty, (), {"it's": "'''"})]
    write_known_failures(path, [*fails, Verdict("PFX-6", Outcome.PASS, 1)], {})
    entries = load_known_failures(path, load_registry())
    assert entries == {
        "PFX-9": KnownFailure("PFX-9", "evicts the newest", trace=TRACE),
        "PFX-8": KnownFailure("PFX-8", nasty, trace={"it's": "'''"}),
    }


def test_writing_again_keeps_what_a_person_wrote(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    until = date(2030, 1, 1)
    entry = KnownFailure("PFX-9", "by hand", "limitation", "https://example.org", until)
    verdict = Verdict("PFX-9", Outcome.KNOWN_FAIL, 1, "seen; limitation: by hand", (), TRACE)
    gone, unasked = KnownFailure("PFX-8", "passes now"), KnownFailure("SCH-2", "not selected")
    write_known_failures(
        path,
        [verdict, Verdict("PFX-8", Outcome.UNEXPECTED_PASS, 1)],
        {"PFX-9": entry, "PFX-8": gone, "SCH-2": unasked},
    )
    data = tomllib.loads(path.read_text())
    assert set(data) == {"PFX-9", "SCH-2"}
    assert data["PFX-9"]["reason"] == "by hand"
    assert data["PFX-9"]["until"] == until
    assert data["PFX-9"]["url"] == "https://example.org"
