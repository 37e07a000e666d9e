"""Who has only the wheel has the whole suite: data, adapters, scenarios, and the pytest plugin."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nanovllm"
ONLY_HERE = {"__pycache__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, since building leaves folders beside the sources."""
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(PACKAGE, tree / "src" / "nanovllm", ignore=shutil.ignore_patterns(*ONLY_HERE))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(tree / done.stdout.splitlines()[-1])


@pytest.mark.spec("API-1")
def test_the_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    packed = set(wheel.namelist())
    files = [f for f in PACKAGE.rglob("*") if f.is_file() and not ONLY_HERE & set(f.parts)]
    assert len(files) > 100
    assert not {str(f.relative_to(PACKAGE.parent)) for f in files} - packed


@pytest.mark.spec("API-1")
def test_the_wheel_brings_the_command_and_imposes_nothing_on_pytest(wheel: zipfile.ZipFile) -> None:
    """A pytest11 entry point would load our package in checkouts whose own has the same name."""
    (name,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert wheel.read(name).decode().split() == [
        "[console_scripts]",
        "nanovllm",
        "=",
        "nanovllm.cli:main",
    ]
