"""What README and docs show is what happens."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

from nanovllm.conformance.adapters import nanovllm_like
from nanovllm.conformance.cli import conformance_app
from nanovllm.conformance.log import check_log
from nanovllm.conformance.verdicts import Outcome

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.spec("API-1")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in code_blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {})
    if page.name == "README.md":
        assert len(capsys.readouterr().out) > 100


@pytest.mark.spec("API-1")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.spec("API-1")
def test_commands_that_are_shown_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    for page in PAGES:
        shown = set(re.findall(r"`make ([a-z]+)|^make ([a-z]+)", page.read_text(), re.MULTILINE))
        assert {a or b for a, b in shown} <= targets


@pytest.mark.spec("API-1")
def test_the_layout_that_is_drawn_is_there() -> None:
    drawing = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    names = re.findall(r"[\w/]+\.py\b", drawing)
    found = {path.name for path in (ROOT / "src" / "nanovllm").rglob("*.py")}
    assert names
    assert not [name for name in names if name not in found]


def commands(page: Path) -> list[list[str]]:
    """`nanovllm conformance` commands of a page with their arguments, in words."""
    pattern = r"(?:^ *|`)(nanovllm conformance \w+ [^`\n]+)"
    lines = re.findall(pattern, page.read_text(), re.MULTILINE)
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[2:] for words in split if "..." not in words]


@pytest.mark.spec("API-1")
def test_conformance_commands_that_are_shown_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").touch()
    suite = typer.main.get_command(conformance_app())
    assert isinstance(suite, typer.core.TyperGroup)
    shown = [words for page in PAGES for words in commands(page)]
    assert {name for name, *_ in shown} >= {"run", "init", "doctor", "check", "explain"}
    for name, *arguments in shown:
        suite.commands[name].make_context(name, list(arguments))


@pytest.mark.spec("API-1")
def test_the_log_that_is_shown_is_judged() -> None:
    (log,) = code_blocks(ROOT / "docs" / "conformance.md", "json")
    verdicts = check_log(log.splitlines())
    assert {verdict.outcome for verdict in verdicts} == {Outcome.PASS}


@pytest.mark.spec("API-1")
def test_options_of_adapters_that_are_shown_exist() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text()
    table = page.split("| `--engine-option` | |")[1].split("\n\n")[0]
    shown = set(re.findall(r"^\| `(\w+)=", table, re.MULTILINE)) - {"NAME"}
    assert len(shown) == 3
    assert shown <= set(inspect.signature(nanovllm_like.adapter).parameters)
