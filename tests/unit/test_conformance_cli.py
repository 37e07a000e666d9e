"""`nanovllm conformance`: what it prints, which files it writes, and its exit codes."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_door import invoke
from typer.testing import Result

from nanovllm.conformance import parts
from nanovllm.conformance.options import RunOptions, option_specs

ENGINES = Path(__file__).parents[1] / "conformance_engines"


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`--engine` of one, in a current directory of its own, for a suite of scenarios alone."""
    monkeypatch.setattr(parts, "suite_parts", lambda: (parts.ScenariosPart("core"),))
    shutil.copy(ENGINES / "idle.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return "idle.py:Idle"


def run(engine: str, *args: str) -> Result:
    return invoke("conformance", "run", "--engine", engine, "--profile", "dev", *args)


def written(path: str) -> Any:
    return json.loads(Path(path).read_text())


# ---- exit codes ------------------------------------------------------------------------------


def test_a_pass_is_0(idle: str) -> None:
    result = run(idle, "--req", "SCH-5")
    assert result.exit_code == 0, result.output
    assert "OK: 1 requirements pass" in result.stdout


def test_a_failure_is_1_and_tells_its_story(idle: str) -> None:
    result = run(idle, "--req", "SCH-7a")
    assert result.exit_code == 1
    assert "SCH-7a fail: " in result.stdout
    assert "is not refused" in result.stdout
    assert f"nanovllm conformance run --engine {idle} --req SCH-7a" in result.stdout
    assert "NOT OK: 1 fail: SCH-7a" in result.stdout


def test_nothing_evaluated_is_1(idle: str) -> None:
    result = run(idle, "--req", "PFX-14")
    assert result.exit_code == 1
    assert "nothing was evaluated" in result.stdout


@pytest.mark.parametrize(("strict", "code"), [([], 0), (["--strict"], 1)])
def test_not_exercised_is_1_if_strict(idle: str, strict: list[str], code: int) -> None:
    result = run(idle, "--req", "SCH-5", "--req", "SCH-16", *strict)
    assert result.exit_code == code
    assert "not exercised: SCH-16" in result.stdout


def test_an_adapter_that_breaks_the_protocol_is_an_error_and_1(idle: str) -> None:
    result = run("idle.py:Unlike", "--req", "SCH-5")
    assert result.exit_code == 1
    assert "SCH-5 error: " in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--req", "PFX-99"], "no requirement is PFX-99"),
        (["--report", "x.pdf"], "x.pdf: must end in .json"),
        (["--level", "shall"], "--level shall: must be one of must, should, may"),
        (["--engine-option", "k"], "--engine-option k: must be NAME=VALUE"),
        (["--known-failures", "none.toml"], "none.toml: there is no such file"),
        (["--replay", "none.json"], "none.json: there is no such file"),
        (["--engine", "nobody"], "no engine 'nobody'"),
        (["--engine", "idle.py:broken"], "no licence"),
        (["--engine", "cmd:true"], "does not start"),
    ],
)
def test_bad_usage_is_2_and_says_why(idle: str, args: list[str], message: str) -> None:
    result = run(idle, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


# ---- known failures --------------------------------------------------------------------------


def test_known_failures_are_written_excused_and_accused_when_stale(idle: str) -> None:
    ids = ["--req", "SCH-5", "--req", "SCH-7a"]
    assert run(idle, *ids, "--known-failures-write", "known.toml").exit_code == 1
    assert list(tomllib.loads(Path("known.toml").read_text())) == ["SCH-7a"]

    excused = run(idle, *ids, "--known-failures", "known.toml")
    assert excused.exit_code == 0, excused.output
    assert "SCH-7a known fail: " in excused.stdout

    with Path("known.toml").open("a") as file:
        file.write('["SCH-5"]\nreason = "is idle"\nkind = "bug"\n')
    stale = run(idle, *ids, "--known-failures", "known.toml")
    assert stale.exit_code == 1
    assert "NOT OK: 1 unexpected pass: SCH-5" in stale.stdout


def test_a_known_failure_of_no_requirement_is_bad_usage(idle: str) -> None:
    Path("known.toml").write_text('["PFX-99"]\nreason = "r"\nkind = "bug"\n')
    result = run(idle, "--known-failures", "known.toml")
    assert result.exit_code == 2
    assert "no requirement is called PFX-99" in result.stderr


# ---- reports ---------------------------------------------------------------------------------


def test_reports_of_all_formats_are_written(idle: str) -> None:
    names = [f"out/report.{suffix}" for suffix in ("json", "html", "md", "xml", "svg")]
    result = run(idle, "--req", "SCH-5", *(arg for name in names for arg in ("--report", name)))
    assert result.exit_code == 0
    assert all(Path(name).stat().st_size for name in names)
    document = written(names[0])
    assert document["complete"] is True
    assert document["engine"]["name"] == "idle"
    assert document["engine"]["version"] == "7"
    assert document["run"]["doors"] == "core"
    assert [r["id"] for r in document["requirements"]] == ["SCH-5"]


def test_a_report_of_an_engine_that_does_not_start_is_not_complete(idle: str) -> None:
    Path("r.json").write_text('{"complete": true}')
    assert run("cmd:true", "--report", "r.json").exit_code == 2
    assert written("r.json")["complete"] is False


@pytest.mark.parametrize("text", ["{", "[]", '{"world": {}}'])
def test_what_is_no_trace_is_bad_usage(idle: str, text: str) -> None:
    Path("trace.json").write_text(text)
    result = run(idle, "--replay", "trace.json")
    assert result.exit_code == 2
    assert "trace.json" in result.stderr


# ---- other commands --------------------------------------------------------------------------


def test_list_shows_what_is_asked_for() -> None:
    result = invoke("conformance", "list", "PFX-1?", "--level", "must")
    assert result.exit_code == 0
    ids = [line.split()[0] for line in result.stdout.splitlines()]
    assert ids[0] == "PFX-10"
    assert all(spec_id.startswith("PFX-1") for spec_id in ids)
    nothing = invoke("conformance", "list", "XYZ-*")
    assert nothing.exit_code == 2
    assert "no requirement is XYZ-*" in nothing.stderr


LOG = [
    {
        "hello": {"engine": "logger", "version": "3", "doors": ["core"]},
        "world": {"block_size": 4, "num_blocks": 8},
    },
    {"op": "add", "request": 0, "prompt": [5, 6, 7], "max_tokens": 2},
    {
        "op": "schedule",
        "plan": {
            "step": 0,
            "rows": [{"id": [0, 0], "start": 0, "count": 3, "block_table": [1]}],
        },
    },
    {"op": "commit", "step": 0, "tokens": [[[0, 0], 8]], "finished": []},
]


def check(path: Path, log: list[Any], *args: str) -> Result:
    path.write_text("".join(json.dumps(line) + "\n" for line in log))
    return invoke("conformance", "check", path, *args)


def test_a_log_is_judged_without_an_adapter(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = check(tmp_path / "log.jsonl", LOG, "--report", str(report))
    assert result.exit_code == 0, result.output
    assert "Conformance of logger 3" in result.stdout
    assert written(str(report))["summary"]["pass"] > 3


def test_a_log_that_shows_a_defect_is_1(tmp_path: Path) -> None:
    rows = [{"id": [0, 0], "start": 0, "count": 0, "block_table": [1]}]
    log = [*LOG[:2], {"op": "schedule", "plan": {"step": 0, "rows": rows}}]
    result = check(tmp_path / "log.jsonl", log, "--req", "SCH-4")
    assert result.exit_code == 1
    assert "NOT OK: 1 fail: SCH-4" in result.stdout
    assert "line 3" in result.stdout


@pytest.mark.parametrize(
    ("log", "args", "message"),
    [
        ([], [], "log.jsonl: the log is empty"),
        ([{"op": "add"}], [], "line 1: expected hello and world"),
        (LOG, ["--req", "XYZ-*"], "no requirement is XYZ-*"),
    ],
)
def test_what_is_no_log_is_bad_usage(
    tmp_path: Path, log: list[Any], args: list[str], message: str
) -> None:
    result = check(tmp_path / "log.jsonl", log, *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_log_of_nothing_that_counts_is_1(tmp_path: Path) -> None:
    result = check(tmp_path / "log.jsonl", LOG[:1])
    assert result.exit_code == 1
    assert "nothing was evaluated" in result.stdout


def test_explain_tells_what_and_why() -> None:
    result = invoke("conformance", "explain", "PFX-6", "--no-story")
    assert result.exit_code == 0
    assert "PFX-6" in result.stdout
    assert "gets it wrong" not in result.stdout
    unknown = invoke("conformance", "explain", "PFX-66")
    assert unknown.exit_code == 2
    assert "did you mean PFX-6" in unknown.stderr


def test_init_writes_an_adapter_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("conformance", "init", "mine.py")
    assert result.exit_code == 0
    compile(Path("mine.py").read_text(), "mine.py", "exec")
    assert "--engine mine.py:adapter" in result.stdout
    again = invoke("conformance", "init", "mine.py")
    assert again.exit_code == 2
    assert "mine.py" in again.stderr


def test_doctor_finds_what_does_not_work(idle: str) -> None:
    result = invoke("conformance", "doctor", "--engine", idle)
    assert result.exit_code == 1
    assert result.stdout.startswith("idle 7: core\n")
    dead = invoke("conformance", "doctor", "--engine", "cmd:true")
    assert dead.exit_code == 1


# ---- options ---------------------------------------------------------------------------------


def test_the_command_line_is_the_one_that_others_script() -> None:
    flags = {spec.flag for spec in option_specs()}
    assert flags == {
        "--engine", "--engine-path", "--engine-python", "--engine-option", "--door", "--level",
        "--req", "--profile", "--seed", "--known-failures", "--known-failures-write", "--replay",
        "--report", "--strict",
    }  # fmt: skip
    repeatable = {spec.flag for spec in option_specs() if spec.repeats}
    assert repeatable == {"--engine-option", "--door", "--req", "--report"}


def test_options_of_an_engine_are_json_or_text() -> None:
    given = ("blocks=4", "name=x", "on=true", "text=a=b", 'list=[1, "2"]')
    options = RunOptions("reference", engine_option=given)
    expected = {"blocks": 4, "name": "x", "on": True, "text": "a=b", "list": [1, "2"]}
    assert options.engine_options() == expected


def test_a_command_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    spaced = tmp_path / "my engine"
    spaced.mkdir()
    command = RunOptions("cmd:node x.js", engine_path=spaced).command("--req", "PFX-*")
    shown = subprocess.run(
        ["sh", "-c", command.replace("nanovllm", "printf '%s\\n'", 1)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.splitlines() == [
        "conformance", "run", "--engine", "cmd:node x.js", "--engine-path", str(spaced), "--req",
        "PFX-*",
    ]  # fmt: skip


def test_help_imports_neither_engine_nor_suite() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from nanovllm.cli import build_app\n"
        "assert CliRunner().invoke(build_app(), ['conformance', 'run', '--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'hypothesis', 'pytest', 'jinja2', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
