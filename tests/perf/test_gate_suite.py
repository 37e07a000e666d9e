"""The gates run real suites of a tiny project, and believe only what ran as it should."""

import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanovllm.cli import build_app
from nanovllm.gate.suite import GateError, Suite, counts_of
from nanovllm.gate.worktree import worktree

pytestmark = pytest.mark.spec("PRF-2")

TINY = """
now = 0.0

def clock():
    global now
    now += 1e-6
    return now

def work(milliseconds):
    global now
    now += milliseconds / 1e3
"""
BENCHMARKS = """
import pytest, tiny

def test_a(benchmark):
    benchmark.pedantic(tiny.work, (2,), rounds=2)

def test_b(benchmark):
    benchmark.pedantic(tiny.work, (3,), rounds=2)
"""
SUITE = Suite("bench", "tiny", timer="tiny.clock", timeout_s=60)
COUNTING = Suite("counting", "tiny", timeout_s=60)


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites start in a third of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_benchmark.plugin")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with two benchmarks on a clock of their own, and a test that counts."""
    for name, text in {
        "src/tiny/__init__.py": TINY,
        "bench/test_it.py": BENCHMARKS,
        "counting/test_counts.py": counting(32),
        "pytest.ini": "[pytest]\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def counting(hashes: int) -> str:
    record = f"record_property('count:hashes', {hashes})"
    return f"import tiny\n\ndef test_x(record_property):\n    {record}\n    assert tiny.clock()\n"


def add_test(tree: Path, text: str) -> None:
    with (tree / "bench" / "test_it.py").open("a") as file:
        file.write(text)


def test_times_and_counts_are_read(tree: Path) -> None:
    times = SUITE.times(tree)
    assert {name: round(1e3 * seconds) for name, seconds in times.items()} == {
        "bench/test_it.py::test_a": 2,
        "bench/test_it.py::test_b": 3,
    }
    assert COUNTING.counts(tree) == {"counting/test_counts.py::test_x": {"hashes": 32}}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_memory_that_was_used_once_is_kept(tree: Path) -> None:
    """Else each of these asks the kernel for 7,680 pages."""
    (tree / "counting" / "test_pages.py").write_text(
        """
import resource

def use():
    return [bytearray(10 << 20) for _ in range(3)]

def test_pages(record_property):
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    record_property("count:thousands of faults", faults // 1000)
"""
    )
    counted = COUNTING.counts(tree)["counting/test_pages.py::test_pages"]
    assert counted == {"thousands of faults": 0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-p xdist -n 1", "ran under xdist"),
        ("--benchmark-disable", "no benchmark was timed|no report"),
        ("-k test_a", "test_b .deselected"),
        ("-m nobody", "ended with 5"),
    ],
)
def test_options_that_would_hide_a_benchmark_are_red(tree: Path, options: str, words: str) -> None:
    (tree / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\n")
    with pytest.raises(GateError, match=words):
        SUITE.times(tree)


def test_tests_that_do_not_run_are_red(tree: Path) -> None:
    add_test(
        tree,
        """
def test_skipped(benchmark): pytest.skip("no device")

@pytest.mark.xfail
def test_expected(benchmark): 1 / 0

@pytest.mark.xfail
def test_surprising(benchmark): benchmark.pedantic(int)
""",
    )
    with pytest.raises(GateError) as raised:
        SUITE.times(tree)
    for words in ("test_skipped (skip", "test_expected (skip", "test_surprising (passed, though"):
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("def test_c(benchmark): 1 / 0", "ended with 1"),
        ("def test_c(): pass", "no benchmark was timed in: bench/test_it.py::test_c"),
    ],
)
def test_tests_that_measure_nothing_are_red(tree: Path, added: str, words: str) -> None:
    add_test(tree, added)
    with pytest.raises(GateError, match=words):
        SUITE.times(tree)


def test_a_package_from_elsewhere_is_red(tree: Path) -> None:
    """As an installed copy would be, which makes base and head the same."""
    with pytest.raises(GateError, match=r"json is .*, which is not below"):
        Suite("counting", "json").counts(tree)


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        ([], "counts nothing"),
        ([("colour", 3)], "counts nothing"),
        ([("count:hashes", 3.0)], "hashes is 3.0, not an integer"),
        ([("count:hashes", True)], "hashes is True, not an integer"),
        ([("count:hashes", 1), ("count:hashes", 2)], "counts something twice"),
    ],
)
def test_counts_that_mean_nothing_are_red(recorded: list[tuple[str, object]], words: str) -> None:
    with pytest.raises(GateError, match=words):
        counts_of("test_x", recorded)


def run_gate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["gate", *arguments])
    return result.exit_code, result.output


def commit(tree: Path) -> None:
    git = ("git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@example.org")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "base")):
        subprocess.run([*git, *arguments], check=True)


def test_a_planted_slowdown_is_red_against_the_commit_before(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The project has a clock of its own, so a second run of a tree would tell nothing new.
    monkeypatch.setattr(Suite, "times", cache(Suite.times))
    commit(tree)
    path = tree / "bench" / "test_it.py"
    path.write_text(path.read_text().replace("(3,)", "(4.5,)"))
    arguments = ("--suite", "bench", "--package", "tiny", "--tree", str(tree))
    code, output = run_gate("times", *arguments, "--timer", "tiny.clock", "--base", "HEAD")
    assert code == 1
    assert "green bench/test_it.py::test_a" in output
    assert "RED   bench/test_it.py::test_b" in output
    assert "1.500 1.500, limit 1.100" in output
    code, output = run_gate("times", *arguments, "--base", "no-such-revision")
    assert (code, "RED" in output) == (1, True)


def test_a_base_that_is_the_tree_itself_is_red(tree: Path) -> None:
    """Not if something was changed and not committed."""
    commit(tree)
    with pytest.raises(GateError, match="'HEAD' is this tree itself"), worktree("HEAD", tree):
        pass
    (tree / "new.py").write_text("")
    with worktree("HEAD", tree) as old:
        assert not (old / "new.py").exists()
    with pytest.raises(GateError, match="itself"), worktree("HEAD", tree, ("bench", "src")):
        pass
    cache = tree / "src" / "__pycache__"
    cache.mkdir()
    (cache / "new.pyc").write_text("")
    with pytest.raises(GateError, match="itself"), worktree("HEAD", tree, ("bench", "src")):
        pass
    (tree / "src" / "new.py").write_text("")
    with worktree("HEAD", tree, ("bench", "src")):
        pass


def test_a_hook_of_git_keeps_its_index(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git tells its hooks where the index of the commit in the making is: not the base's."""
    commit(tree)
    index = tree / ".git" / "index.lock"
    shutil.copy(tree / ".git" / "index", index)
    (tree / "bench" / "more.py").write_text("")
    monkeypatch.setenv("GIT_INDEX_FILE", str(index))
    monkeypatch.setenv("GIT_DIR", ".git")
    before = index.read_bytes()
    with worktree("HEAD", tree, ("bench",)) as old:
        assert (old / "bench" / "test_it.py").exists()
    assert index.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("times", ("--base-tree", "{tree}"), "is this tree itself"),
        ("times", ("--base-tree", "{tree}/no"), "no directory"),
        ("times", ("--base-tree", "{tree}/bench", "--python", "no/python"), "no/python does not"),
        ("counts", ("--update", "--baseline", "{tree}/no/x.json"), "no directory"),
        ("counts", ("--update", "--python", "no/python"), "no/python does not start"),
    ],
    ids=str,
)
def test_mistakes_are_red_and_named(
    tree: Path, command: str, arguments: tuple[str, ...], words: str
) -> None:
    suite = ("--suite", "bench" if command == "times" else "counting", "--package", "tiny")
    given = [argument.format(tree=tree) for argument in arguments]
    code, output = run_gate(command, *suite, "--tree", str(tree), *given)
    assert code == 1
    assert "gate: RED" in output
    assert words in " ".join(output.split())


def test_a_planted_hash_is_red_until_the_baseline_is_updated(tree: Path) -> None:
    arguments = ("counts", "--suite", "counting", "--package", "tiny", "--tree", str(tree))
    assert run_gate(*arguments)[0] == 1, "without a baseline"
    assert run_gate(*arguments, "--update")[0] == 0
    assert run_gate(*arguments) == (0, "1 count is as before\ngate: green\n")
    (tree / "counting" / "test_counts.py").write_text(counting(33))
    code, output = run_gate(*arguments)
    assert code == 1
    assert "hashes: 33, baseline 32" in output
