"""Whether tests and requirements name each other: statically, and while pytest collects."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nanovllm.conformance.requirement import Requirement


class Naming(NamedTuple):
    """A test says that it shows a requirement."""

    spec_id: str
    test: str


class MarkedItem(Protocol):
    """What is needed of a `pytest.Item`."""

    @property
    def nodeid(self) -> str: ...

    def iter_markers(self, name: str) -> Iterable[Any]: ...


def namings_of_items(items: Iterable[MarkedItem]) -> Iterator[Naming]:
    for item in items:
        for marker in item.iter_markers("spec"):
            for spec_id in marker.args:
                yield Naming(spec_id, item.nodeid)


def namings_in(tests: Path) -> Iterator[Naming]:
    """Literal ids in `pytest.mark.spec(...)` of all test files below `tests`, nothing imported.

    Names of tests begin with `tests.name`, so that pytest takes them from the folder above.
    """
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        yield from _in_body(tree.body, path.relative_to(tests.parent).as_posix())


def _in_body(body: Sequence[ast.stmt], where: str) -> Iterator[Naming]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # `pytestmark`, or a table of parameters: good for the whole file.
            yield from _in_marks(node, where)
        elif node.name.lower().startswith("test"):
            name = f"{where}::{node.name}"
            for decorator in node.decorator_list:
                yield from _in_marks(decorator, name)
            if isinstance(node, ast.ClassDef):
                yield from _in_body(node.body, name)


def _in_marks(node: ast.AST, where: str) -> Iterator[Naming]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.spec"):
            for argument in call.args:
                if isinstance(argument, ast.Constant):
                    yield Naming(str(argument.value), where)


def unknown_ids(namings: Iterable[Naming], requirements: Mapping[str, Requirement]) -> list[str]:
    """A line for each naming of what is no requirement."""
    return [
        f"{naming.test}: {naming.spec_id!r} is no requirement"
        for naming in namings
        if naming.spec_id not in requirements
    ]


def lint(namings: Iterable[Naming], requirements: Mapping[str, Requirement]) -> list[str]:
    """What is wrong between tests and requirements, a line each.

    A must without a test, unless it says what it waits for (`pending`); one that says so although
    a test names it; a test that names what is no requirement.
    """
    namings = list(namings)
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for naming in namings:
        tests[naming.spec_id].append(naming.test)
    problems = unknown_ids(namings, requirements)
    for requirement in requirements.values():
        named_by = tests[requirement.id]
        if requirement.pending and named_by:
            problems.append(f"{requirement.id}: pending, but {named_by[0]} names it")
        if requirement.level == "must" and not requirement.pending and not named_by:
            problems.append(f"{requirement.id}: a must without a test ({requirement.title})")
    return problems
