"""The suite inside pytest: verdicts from the tests that name a requirement, or from an engine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# What these runs import is imported here once, and not by each of them anew.
import nanovllm.conformance.plugin_own
import nanovllm.conformance.reports.terminal  # noqa: F401
from nanovllm.conformance import plugin_engine
from nanovllm.conformance.parts import ScenariosPart

ENGINES = Path(__file__).parents[1] / "conformance_engines"

TESTS = """
import pytest

@pytest.mark.spec("BLK-1")
def test_conserved():
    pass

@pytest.mark.spec("BLK-1", "BLK-2")
def test_shared():
    assert {two} == 2

@pytest.mark.spec("BLK-3")
def test_skipped():
    pytest.skip("no GPU")

@pytest.mark.spec("SCH-2")
@pytest.mark.xfail(reason="reported")
def test_expected():
    assert {three} == 3

@pytest.mark.spec("SCH-1")
def test_policy():
    pass

def test_of_nothing():
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A repository with some tests, and the plugin loaded by its conftest."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(plugin_engine, "suite_parts", lambda: (ScenariosPart("core"),))
    pytester.makeconftest('pytest_plugins = ("nanovllm.conformance.plugin",)')
    pytester.makeini("[pytest]\nmarkers = spec(*ids): requirements")
    return pytester


def run_tests(suite: pytest.Pytester, *args: str, two: int = 2, three: int = 4) -> pytest.RunResult:
    suite.makepyfile(TESTS.format(two=two, three=three))
    return suite.runpytest_inprocess(*args)


def verdicts(path: Path) -> dict[str, str]:
    document: dict[str, Any] = json.loads(path.read_text())
    return {r["id"]: r["verdict"] for r in document["requirements"]}


# ---- without an engine -----------------------------------------------------------------------


def test_a_requirement_has_the_verdict_of_its_tests(suite: pytest.Pytester) -> None:
    result = run_tests(suite, "--report", "r.json", two=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    found = verdicts(suite.path / "r.json")
    assert found["BLK-1"] == found["BLK-2"] == "fail"
    assert found["BLK-3"] == "not_exercised"
    assert found["SCH-2"] == "known_fail"
    assert found["SCH-1"] == "pass"
    assert found["BLK-4"] == "not_exercised"
    requirement = next(
        r
        for r in json.loads((suite.path / "r.json").read_text())["requirements"]
        if r["id"] == "BLK-1"
    )
    assert requirement["evaluations"] == 2
    assert [name.partition("::")[2] for name in requirement["tests"]] == [
        "test_conserved",
        "test_shared",
    ]
    assert "assert 1 == 2" in requirement["message"]


def test_a_line_sums_up_a_plain_run_and_leaves_its_exit_code(suite: pytest.Pytester) -> None:
    result = run_tests(suite)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["requirements: 3 pass; 1 known fail; * not exercised"])


def test_a_plain_run_without_marks_says_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_x(): pass")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("requirements:*")


@pytest.mark.parametrize(
    ("args", "passed", "code"),
    [
        (["--req", "BLK-1"], 2, 0),
        (["--req", "BLK-*"], 2, 0),
        (["--req", "BLK-1", "--req", "SCH-1"], 3, 0),
        (["--level", "must"], 2, 0),
        (["--req", "BLK-1", "--strict"], 2, 0),
        (["--req", "BLK-*", "--strict"], 2, 1),
        (["--req", "BLK-3"], 0, 1),
        (["--req", "BLK-4"], 0, 1),
    ],
)
def test_only_what_is_asked_for_runs_and_is_judged(
    suite: pytest.Pytester, args: list[str], passed: int, code: int
) -> None:
    result = run_tests(suite, *args)
    assert result.parseoutcomes().get("passed", 0) == passed
    assert result.ret == code


def test_a_test_that_passes_unexpectedly_is_an_unexpected_pass(suite: pytest.Pytester) -> None:
    result = run_tests(suite, "--req", "SCH-2", three=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["NOT OK: 1 unexpected pass: SCH-2"])


def test_an_error_of_a_fixture_is_an_error(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest

        @pytest.fixture
        def engine():
            raise OSError("no device")

        @pytest.mark.spec("BLK-1")
        def test_it(engine):
            pass
        """
    )
    result = suite.runpytest_inprocess("--report", "r.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert verdicts(suite.path / "r.json")["BLK-1"] == "error"


def test_a_run_that_stops_early_is_not_complete(suite: pytest.Pytester) -> None:
    run_tests(suite, "--report", "r.json")
    assert json.loads((suite.path / "r.json").read_text())["complete"] is True
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.spec("BLK-1")
        def test_a():
            pass

        @pytest.mark.spec("BLK-2")
        def test_b():
            pytest.exit("enough")
        """
    )
    suite.runpytest_inprocess("--report", "r.json")
    assert json.loads((suite.path / "r.json").read_text())["complete"] is False


def test_workers_of_xdist_report_to_one_verdict(suite: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    suite.makepyfile(TESTS.format(two=1, three=4))
    result = suite.runpytest_inprocess(
        "-p", "xdist", "-n", "1", "--req", "BLK-*", "--report", "r.json"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert verdicts(suite.path / "r.json")["BLK-1"] == "fail"


def test_a_test_that_names_no_requirement_is_refused(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.spec('PFX-99')\ndef test_x(): pass")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "'PFX-99' is no requirement" in "\n".join(result.errlines + result.outlines)


# ---- with an engine --------------------------------------------------------------------------


def engine(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    """A run on an engine that does nothing; of the suite, the scenarios alone."""
    shutil.copy(ENGINES / "idle.py", suite.path)
    suite.makepyfile("raise RuntimeError('the tests of the repository are not even imported')")
    return suite.runpytest_inprocess("--engine", "idle.py:Idle", "--profile", "dev", *args)


@pytest.mark.parametrize(
    ("ids", "outcomes", "code"),
    [
        (["SCH-5"], {"passed": 1}, 0),
        (["SCH-7a", "SCH-5"], {"passed": 1, "failed": 1}, 1),
        (["SCH-5", "PFX-14"], {"passed": 1, "skipped": 1}, 0),
        (["SCH-5", "SCH-16"], {"passed": 1, "skipped": 1}, 0),
        (["PFX-14"], {"skipped": 1}, 1),
        (["SCH-5", "SCH-16", "--strict"], {"passed": 1, "skipped": 1}, 1),
    ],
)
def test_each_requirement_is_a_test_of_the_engine(
    suite: pytest.Pytester, ids: list[str], outcomes: dict[str, int], code: int
) -> None:
    flags = [word for i in ids for word in (["--req", i] if i != "--strict" else [i])]
    result = engine(suite, *flags)
    result.assert_outcomes(**outcomes)
    assert result.ret == code


def test_a_failure_tells_its_story_in_the_summary(suite: pytest.Pytester) -> None:
    result = engine(suite, "--req", "SCH-7a", "--report", "r.json")
    result.stdout.fnmatch_lines(
        ["*fail: *is not refused", "reset(*", "SCH-7a fail: *", "NOT OK: 1 fail: SCH-7a"]
    )
    assert verdicts(suite.path / "r.json") == {"SCH-7a": "fail"}


def test_a_known_failure_is_expected(suite: pytest.Pytester) -> None:
    (suite.path / "known.toml").write_text('["SCH-7a"]\nreason = "idle"\nkind = "bug"\n')
    result = engine(suite, "--req", "SCH-7a", "--known-failures", "known.toml")
    result.assert_outcomes(xfailed=1)
    assert result.ret == pytest.ExitCode.OK


def test_collecting_does_not_start_the_engine(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("--engine", "cmd:false", "--req", "BLK-*", "--co", "-q")
    assert result.ret == pytest.ExitCode.OK
    assert any(line.endswith("BLK-1") for line in result.outlines)


def test_an_engine_that_does_not_start_fails_every_test(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("--engine", "cmd:false", "--req", "BLK-*")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "passed" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*does not start*"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seed", "3", "--door", "core"], "--door, --seed: need --engine"),
        (["--engine", "reference", "--report", "x.pdf"], "x.pdf: must end in .json"),
        (["--engine", "reference", "-p", "xdist", "-n", "2"], "leave out -n"),
        (["--engine", "reference", "--req", "PFX-99"], "no requirement is PFX-99"),
    ],
)
def test_bad_usage_is_an_error_of_usage(
    suite: pytest.Pytester, args: list[str], message: str
) -> None:
    suite.makepyfile("def test_x(): pass")
    result = suite.runpytest_inprocess(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in "\n".join(result.errlines + result.outlines)


def test_the_plugin_imports_nothing_heavy() -> None:
    program = (
        "import sys, nanovllm.conformance.plugin\n"
        "heavy = {'torch', 'transformers', 'hypothesis', 'jinja2', 'numpy', 'typer', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
