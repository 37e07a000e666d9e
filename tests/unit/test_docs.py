"""What README and docs show is what happens."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.spec("API-1")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
