"""The requirements, the page made of them, and what holds tests and requirements together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm.conformance import registry
from nanovllm.conformance.protocol import CAPABILITIES
from nanovllm.conformance.registry import (
    Requirement,
    explain,
    list_requirements,
    load_registry,
    load_spec,
    validate_markers,
)
from nanovllm.conformance.requirement import Level
from nanovllm.conformance.spec_lint import Naming, lint, namings_in
from nanovllm.conformance.spec_page import spec_page

ROOT = Path(__file__).parents[2]

# ---- the file --------------------------------------------------------------------------------


def test_each_group_is_numbered_without_gaps() -> None:
    last = {
        "SEQ": 7, "BLK": 9, "PFX": 17, "SCH": 16, "FRK": 3, "KV": 8, "MOD": 8, "SMP": 7, "STP": 4,
        "GRF": 5, "TP": 8, "MEM": 3, "LOD": 5, "CFG": 3, "API": 8, "PRF": 3,
    }  # fmt: skip
    parts = {"SCH-7": "abcd", "SCH-12": "abcd", "SMP-3": "abc", "STP-3": "abc", "TP-3": "abc"}
    numbers = [f"{group}-{i + 1}" for group in last for i in range(last[group])]
    expected = [number + part for number in numbers for part in parts.get(number, [""])]
    assert list(load_registry()) == expected


def test_marks_of_requirements() -> None:
    spec = load_registry()
    assert [r.id for r in spec.values() if r.level == "should"] == ["PFX-9", "SCH-1", "SCH-10"]
    whole = {"SEQ", "MEM", "LOD", "CFG", "API"}
    assert Counter(r.group for r in spec.values() if r.ref_only) == {
        **{g: sum(r.group == g for r in spec.values()) for g in whole},
        "SEQ": 6, "BLK": 2, "SCH": 1, "KV": 4, "MOD": 6, "TP": 2, "PRF": 2,
    }  # fmt: skip
    assert spec["PFX-7"].capabilities == ("prefix_cache", "pool")
    assert spec["PFX-7"].missing({"pool"}) == ("prefix_cache",)
    assert spec["BLK-3"].missing(()) == ()
    assert {name for r in spec.values() for name in r.capabilities} >= CAPABILITIES - {
        "cow", "hash_override",
    }  # fmt: skip


def test_prose_says_no_more_than_once_what_it_says() -> None:
    for attribute in ("title", "text", "why"):
        counts = Counter(getattr(r, attribute) for r in load_registry().values())
        assert counts.most_common(1)[0][1] == 1


def test_every_must_has_tests_of_this_project() -> None:
    assert not [r.id for r in load_registry().values() if r.pending]


# ---- finding and explaining ------------------------------------------------------------------


def ids(**asked: object) -> list[str]:
    return [requirement.id for requirement in list_requirements(**asked)]


def test_requirements_are_listed_by_id_level_door_and_capability() -> None:
    assert ids() == list(load_registry())
    assert ids(pattern="PFX-1, SCH-7?") == ["PFX-1", "SCH-7a", "SCH-7b", "SCH-7c", "SCH-7d"]
    assert ids(levels=["should"], pattern="S*") == ["SCH-1", "SCH-10"]
    assert ids(doors=["blocks"], pattern="BLK-*") == ["BLK-1", "BLK-2", "BLK-3", "BLK-5", "BLK-8"]
    assert ids(doors=["engine"], pattern="API-*") == []
    assert ids(capabilities=[], pattern="STP-*") == ["STP-1"]
    assert ids(capabilities=["stop"], pattern="STP-*") == ["STP-1", "STP-3a", "STP-3b", "STP-3c"]


def test_an_explanation_holds_all_that_is_known() -> None:
    page = explain("PFX-6")
    requirement = load_registry()["PFX-6"]
    for part in (requirement.title, requirement.text, requirement.why, "`prefix_cache`"):
        assert part in page
    assert "[nano-vllm#144](https://github.com/GeeeekExplorer/nano-vllm/issues/144)" in page
    assert "tests/unit/" in page
    assert "**Blocked by**: PFX-2" in explain("PFX-11")


def test_an_explanation_lists_the_tests_of_a_folder(tmp_path: Path) -> None:
    write_test(tmp_path, '@pytest.mark.spec("KV-1")\ndef test_one(): ...')
    assert "**Tests**: `tests/test_it.py::test_one`" in explain("KV-1", tmp_path / "tests")
    assert "**Tests**" not in explain("KV-2", tmp_path / "tests")


def test_an_unknown_id_is_refused_with_those_like_it() -> None:
    with pytest.raises(ValueError, match=r"'pfx-60' is no requirement .* did you mean .*PFX-6"):
        explain("pfx-60")


# ---- the page --------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "spec.md").read_text(encoding="utf-8") == spec_page(load_spec())


def test_the_page_has_each_requirement_and_its_links_lead_somewhere() -> None:
    page = spec_page(load_spec())
    for requirement in load_registry().values():
        assert f'<a id="{requirement.id.lower()}"></a>' in page
        assert requirement.text in page
    for part in page.split("](#")[1:]:
        assert f'<a id="{part.partition(")")[0]}"></a>' in page


def test_a_page_that_is_not_current_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "spec.md"
    assert registry.main(["--check", str(page)]) == 1
    assert registry.main(["--write", str(page), "--check", str(page)]) == 0
    page.write_text(page.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert registry.main(["--check", str(page)]) == 1
    assert capsys.readouterr().err.count("is not current") == 2


# ---- tests name requirements -----------------------------------------------------------------


def write_test(folder: Path, source: str) -> Path:
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test_it.py").write_text(f"import pytest\n{source}\n", encoding="utf-8")
    return tests


KV_1 = '@pytest.mark.spec("KV-1")\n'
KV_2 = '@pytest.mark.spec("KV-2")\n'
A = "::TestA"
PARAM = '@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.spec("KV-3"))])\n'


@pytest.mark.parametrize(
    ("source", "namings"),
    [
        (f"{KV_1}{KV_2}def test_a(): ...", {"KV-1": "::test_a", "KV-2": "::test_a"}),
        (f"{KV_1}class TestA:\n {KV_2} def test_b(): ...", {"KV-1": A, "KV-2": f"{A}::test_b"}),
        (f"{PARAM}def test_a(x): ...", {"KV-3": "::test_a"}),
        ('pytestmark = [pytest.mark.unit, pytest.mark.spec("KV-4")]', {"KV-4": ""}),
        (f"{KV_1}def helper(): ...", {}),
        ("@pytest.mark.spec(*IDS)\ndef test_a(): ...", {}),
        ('def test_a():\n  """As @pytest.mark.spec("KV-1") says."""', {}),
    ],
)
def test_ids_are_found_without_importing(
    tmp_path: Path, source: str, namings: dict[str, str]
) -> None:
    found = namings_in(write_test(tmp_path, source))
    assert {naming.spec_id: naming.test for naming in found} == {
        spec_id: f"tests/test_it.py{name}" for spec_id, name in namings.items()
    }


def made(number: int, level: Level = "must", pending: str = "") -> Requirement:
    spec_id = f"ABC-{number}"
    return Requirement(spec_id, "One", "It.", "So.", level, ("core",), (), "0.1", pending=pending)


def test_lint_finds_untested_musts_stale_waits_and_unknown_ids() -> None:
    all_of_them = [
        made(1), made(2, "should"), made(3, pending="x"), made(4, pending="x"), made(5),
    ]  # fmt: skip
    named = ("ABC-4", "ABC-5", "ABC-")
    namings = [Naming(spec_id, f"t.py::test_{spec_id[4:]}") for spec_id in named]
    assert lint(namings, {requirement.id: requirement for requirement in all_of_them}) == [
        "t.py::test_: 'ABC-' is no requirement",
        "ABC-1: a must without a test (One)",
        "ABC-4: pending, but t.py::test_4 names it",
    ]


def test_lint_is_a_command_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = write_test(tmp_path, '@pytest.mark.spec("KV-1")\ndef test_one(): ...')
    assert registry.main(["--lint", str(tests)]) == 1
    untested = {line.partition(":")[0] for line in capsys.readouterr().err.splitlines()}
    musts = {r.id for r in load_registry().values() if r.level == "must" and not r.pending}
    assert untested == musts - {"KV-1"}


def test_collected_markers_are_validated() -> None:
    def item(*spec_ids: str) -> SimpleNamespace:
        markers = [SimpleNamespace(args=spec_ids)]
        return SimpleNamespace(nodeid="t.py::test_a", iter_markers=lambda name: markers)

    assert validate_markers([item("KV-1", "PFX-6"), item()]) == []
    assert validate_markers([item("KV-1", "KV-99")]) == ["t.py::test_a: 'KV-99' is no requirement"]


def test_an_unknown_id_stops_the_collection(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ("nanovllm.conformance.plugin",)')
    pytester.makeini("[pytest]\nmarkers = spec(*ids): requirements")
    pytester.makepyfile('import pytest\n\n@pytest.mark.spec("SCH-99")\ndef test_one(): ...')
    done = pytester.runpytest_inprocess("-p", "no:randomly")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines("*::test_one: 'SCH-99' is no requirement*")
