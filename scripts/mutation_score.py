"""Changes one thing at a time in what decides (blocks, plans, sampling): do the tests notice?

    python scripts/mutation_score.py                      # all modules, a worker per processor
    python scripts/mutation_score.py --only scheduler --every 4

A mutant is a changed comparison, operator, constant, condition, or a deleted statement. It is
killed if one of its module's unit tests fails, or the state machine; what survives is listed, to be
explained or tested. Assertions of our own invariants are left alone: no test depends on them.

Tests run in forks of one process that has imported everything, so a mutant costs a second or two.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/nanovllm")
TIME_LIMIT = 60.0  # seconds; a mutant that never ends is noticed by whoever waits for it

CORE_TESTS = (
    "block_manager block_hash prefix_cache scheduler preemption samples sequence model_input "
    "tutorial_defects async_scheduling"
)
SAMPLER_TESTS = "sampler sampler_filters sampler_distribution logits_processors"
MACHINE = "tests/property/test_scheduler_machine.py"
TESTS = {
    "engine/sequence.py": CORE_TESTS,
    "engine/block_manager.py": CORE_TESTS,
    "engine/request_queues.py": CORE_TESTS,
    "engine/scheduler.py": CORE_TESTS,
    "layers/sampler.py": SAMPLER_TESTS,
    "layers/logits_filters.py": SAMPLER_TESTS,
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Continue, ast.Break)
DELETED = (*SIMPLE, ast.If, ast.For)


@dataclass(frozen=True)
class Mutant:
    """A module's source with one change."""

    module: str
    line: int
    change: str
    source: str


def mutants_of(module: str) -> Iterator[Mutant]:
    """All of a module, in the order of its syntax tree."""
    tree = ast.parse((ROOT / PACKAGE / module).read_text(encoding="utf-8"))
    asserted = {
        id(node) for a in ast.walk(tree) if isinstance(a, ast.Assert) for node in ast.walk(a)
    }
    for node in ast.walk(tree):
        for change in changes_of(node) if id(node) not in asserted else ():
            original = copy.copy(node.__dict__)
            node.__dict__.update(change.fields)
            source = ast.unparse(ast.fix_missing_locations(tree))
            node.__dict__ = original
            yield Mutant(module, change.line, change.text, source)


@dataclass(frozen=True)
class Change:
    """New fields of a node of the tree."""

    line: int
    text: str
    fields: dict[str, object]


def changes_of(node: ast.AST) -> Iterator[Change]:
    """What may be changed at one node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            new = COMPARISONS[type(operator)]
            yield Change(node.lineno, f"{name(operator)} -> {new.__name__}", {"ops": [new()]})
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in OPERATORS:
            swapped = OPERATORS[type(operator)]
            yield Change(node.lineno, f"{name(operator)} -> {swapped.__name__}", {"op": swapped()})
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield Change(node.lineno, f"{name(operator)} -> {name(other)}", {"op": other})
        case ast.Constant(value=bool(value)):
            yield Change(node.lineno, f"{value} -> {not value}", {"value": not value})
        case ast.Constant(value=int(value)):
            yield Change(node.lineno, f"{value} -> {value + 1}", {"value": value + 1})
        case ast.FunctionDef() | ast.If() | ast.For() | ast.While():
            yield from deletions_in(node)


def deletions_in(node: ast.FunctionDef | ast.If | ast.For | ast.While) -> Iterator[Change]:
    for field in ("body", "orelse"):
        statements = getattr(node, field, [])
        for i, statement in enumerate(statements):
            is_docstring = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if isinstance(statement, DELETED) and not is_docstring:
                rest = [*statements[:i], ast.Pass(), *statements[i + 1 :]]
                yield Change(statement.lineno, f"no {ast.unparse(statement)[:50]}", {field: rest})


def name(node: ast.AST) -> str:
    return type(node).__name__


# ---- trying one --------------------------------------------------------------------------------


def tree_of_worker() -> Path:
    """A copy of sources and tests for this process alone."""
    tree = Path(tempfile.gettempdir()) / f"nanovllm-mutants-{os.getpid()}"
    if not tree.exists():
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, tree / part)
        for file in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / file, tree)
        sys.path[:0] = [str(tree / "src")]
        sys.dont_write_bytecode = True
        os.environ |= {"NANOVLLM_PROFILE": "mutation", "OMP_NUM_THREADS": "1"}
        import hypothesis.stateful  # noqa: F401  # forks have it, and torch, already
        import pytest  # noqa: F401
        import torch  # noqa: F401
        from transformers import PreTrainedTokenizerFast  # noqa: F401
    return tree


def is_killed(mutant: Mutant) -> bool:
    """Whether a test notices."""
    tree = tree_of_worker()
    path = tree / PACKAGE / mutant.module
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        unit = [f"tests/unit/test_{test}.py" for test in TESTS[mutant.module].split()]
        in_core = TESTS[mutant.module] is CORE_TESTS
        return fails(tree, unit) or (in_core and fails(tree, [MACHINE]))
    finally:
        path.write_text(original, encoding="utf-8")


def fails(tree: Path, tests: list[str]) -> bool:
    """Whether these tests fail, crash or never end, in a fork."""
    child = os.fork()
    if child == 0:
        run_tests(tree, tests)
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def run_tests(tree: Path, tests: list[str]) -> None:
    """In the fork; never returns."""
    os.setpgrp()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(tree)
    import pytest

    code = 1
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]))
    finally:
        os._exit(code)


# ---- all of them -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="modules whose path has this in it")
    parser.add_argument("--every", type=int, default=1, help="try one of so many mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    modules = [module for module in TESTS if options.only in module]
    chosen = [m for module in modules for m in list(mutants_of(module))[:: options.every]]
    survivors: list[Mutant] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for mutant, killed in zip(chosen, pool.map(is_killed, chosen), strict=True):
            if not killed:
                survivors.append(mutant)
                print(f"survived: {mutant.module}:{mutant.line}: {mutant.change}", flush=True)
    print("| module | mutants | killed |\n|---|---|---|")
    for module in modules:
        total = sum(mutant.module == module for mutant in chosen)
        left = sum(mutant.module == module for mutant in survivors)
        if total:
            print(f"| {module} | {total} | {total - left} ({1 - left / total:.0%}) |")


if __name__ == "__main__":
    main()
