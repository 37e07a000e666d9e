"""The commands of `nanovllm gate`. Exit code 0 is green, 1 red, whatever made it so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from nanovllm.gate.counts import differences, read_baseline, write_baseline
from nanovllm.gate.suite import GateError, Suite
from nanovllm.gate.times import judge, repeats_of
from nanovllm.gate.worktree import worktree

SuitePath = Annotated[str, typer.Option("--suite", help="Tests, relative to the tree's root.")]
Package = Annotated[str, typer.Option(help="What they measure; it must come from the tree.")]
Source = Annotated[str, typer.Option(help="Directory of the tree that goes on PYTHONPATH.")]
Python = Annotated[
    str, typer.Option(help="Interpreter that runs the tests.", show_default="this one")
]
Tree = Annotated[Path, typer.Option("--tree", help="Root of the tree to judge.")]


def gate_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    app.callback()(_about)
    app.command()(times)
    app.command()(counts)
    return app


def _about() -> None:
    """Regression gates over a project's own benchmarks and counts; what did not run is red.

    nanovllm gate times --suite benchmarks --package mypackage --base origin/main

    nanovllm gate counts --suite benchmarks/counts --package mypackage
    """


@contextmanager
def _closed() -> Iterator[None]:
    """Whatever goes wrong is red."""
    try:
        yield
    except GateError as error:
        typer.echo(f"gate: RED, {error}")
        raise typer.Exit(1) from error


def _base(
    revision: str, directory: Path | None, head: Path, measured: tuple[str, str]
) -> AbstractContextManager[Path]:
    """The tree to compare with; GateError if it is not there, or is the head."""
    if directory is None:
        return worktree(revision, head, measured)
    base = directory.resolve()
    if not base.is_dir():
        raise GateError(f"there is no directory {str(directory)!r}")
    if base == head:
        raise GateError(f"the base tree {str(directory)!r} is this tree itself")
    return nullcontext(base)


def _end(green: bool) -> None:
    typer.echo("gate: green" if green else "gate: RED")
    raise typer.Exit(0 if green else 1)


def times(
    suite: SuitePath,
    package: Package,
    tree: Tree = Path(),
    base: Annotated[
        str, typer.Option(envvar="NANOVLLM_GATE_BASE", help="Revision to compare with.")
    ] = "HEAD~1",
    base_tree: Annotated[
        Path | None, typer.Option(help="A directory to compare with instead.")
    ] = None,
    source: Source = "src",
    python: Python = sys.executable,
    timer: Annotated[str, typer.Option(help="pytest-benchmark's timer.")] = "time.process_time",
    added: Annotated[list[str] | None, typer.Option(help="A benchmark the base lacks.")] = None,
    removed: Annotated[list[str] | None, typer.Option(help="A benchmark the head lacks.")] = None,
) -> None:
    """Time the benchmarks of a base and of this tree in turn; red if any became slower.

    Slower is beyond 10 % and beyond five times the variation measured meanwhile, in two of three
    repeats.
    """
    measured = Suite(suite, package, source, python, timer)
    head = tree.resolve()
    with _closed(), _base(base, base_tree, head, (suite, source)) as old:
        rows = judge(repeats_of(measured.times, old, head), added or (), removed or ())
    for row in rows:
        typer.echo(row)
    _end(not any(row.is_slower for row in rows))


def counts(
    suite: SuitePath,
    package: Package,
    tree: Tree = Path(),
    baseline: Annotated[
        Path | None, typer.Option(help="By default counts.json beside the tests.")
    ] = None,
    source: Source = "src",
    python: Python = sys.executable,
    update: Annotated[bool, typer.Option("--update", help="Write the baseline anew.")] = False,
) -> None:
    """Count what this tree does, exactly; red if any number is not the baseline's."""
    measured = Suite(suite, package, source, python)
    head = tree.resolve()
    tests = head / suite
    path = baseline or (tests if tests.is_dir() else tests.parent) / "counts.json"
    with _closed():
        if update:
            if not path.parent.is_dir():
                raise GateError(f"there is no directory {str(path.parent)!r} for the baseline")
            found = write_baseline(path, measured, head)
            typer.echo(f"{path}: {sum(map(len, found.values()))} counts")
            return
        expected = read_baseline(path)
        wrong = differences(measured.counts(head), expected)
    for difference in wrong:
        typer.echo(difference)
    if wrong:
        typer.echo("If that is meant, run it again with --update and commit the baseline.")
    else:
        number = sum(map(len, expected.values()))
        typer.echo(f"{number} {'count is' if number == 1 else 'counts are'} as before")
    _end(not wrong)
