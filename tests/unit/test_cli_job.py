"""`nanovllm generate --input`: what is reported, and exit codes."""

import json
from pathlib import Path

import pytest
from cli_door import GREEDY_ARGS, POOL_ARGS, invoke

LINES = ['{"prompt": "a"}', "{bad", '{"prompt": "b", "id": 3}']


@pytest.fixture
def engine_args(checkpoint: Path) -> list[str]:
    return ["--model", str(checkpoint), *POOL_ARGS]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(LINES))
    return file


def test_a_job_reports_bad_lines_and_exits_1(
    source: Path, tmp_path: Path, engine_args: list[str]
) -> None:
    target = tmp_path / "out.jsonl"
    args = ["generate", "-i", source, "-o", target, *GREEDY_ARGS, *engine_args]
    result = invoke(*args)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"{source}, line 2: not JSON" in result.stderr
    assert "3 lines; 1 failed" in result.stderr
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [("error" in r, r.get("id")) for r in records] == [
        (False, None),
        (True, None),
        (False, 3),
    ]

    again = invoke(*args, "--json")
    assert again.exit_code == 1
    assert again.stderr == ""
    assert json.loads(again.stdout) == {
        "input": str(source), "output": str(target),
        "num_lines": 3, "num_failed": 1, "num_resumed": 3,
    }  # fmt: skip

    other = invoke(*args, "--seed", "1")
    assert other.exit_code == 2
    assert "belongs to another job" in other.stderr

    source.write_text(LINES[0])
    anew = invoke(*args, "--overwrite")
    assert anew.exit_code == 0
    assert "1 lines; 0 failed" in anew.stderr
    assert target.read_text().splitlines() == [json.dumps(records[0])]


def test_an_interrupted_job_exits_130_and_says_how_to_go_on(
    source: Path, tmp_path: Path, engine_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nanovllm.engine.model_runner.ModelRunner.run", interrupt)
    result = invoke("generate", "-i", source, "-o", tmp_path / "out.jsonl", *engine_args)
    assert result.exit_code == 130
    assert "the same command goes on where this one stopped" in result.stderr
