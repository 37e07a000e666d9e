"""The requirements: find them, explain them, and keep page and tests in step with them.

`python -m nanovllm.conformance.registry --write docs/spec.md` generates the page, `--check` fails
if it is not current, and `--lint tests` if a must has no test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from nanovllm.conformance.requirement import Requirement, Spec, load_spec
from nanovllm.conformance.spec_lint import (
    MarkedItem,
    lint,
    namings_in,
    namings_of_items,
    unknown_ids,
)
from nanovllm.conformance.spec_page import requirement_page, spec_page

__all__ = [
    "Requirement",
    "Spec",
    "explain",
    "list_requirements",
    "load_registry",
    "load_spec",
    "validate_markers",
]


def load_registry() -> Mapping[str, Requirement]:
    """All requirements by id, in the order of the specification."""
    return load_spec().requirements


def list_requirements(
    *,
    pattern: str = "*",
    levels: Collection[str] = (),
    doors: Collection[str] = (),
    capabilities: Collection[str] | None = None,
) -> list[Requirement]:
    """Those that match all that is asked; what is left out matches everything.

    Args:
        pattern: of ids, as in a shell; several are separated by commas: `PFX-*,SCH-7?`.
        doors: a requirement is listed if one of them shows it; then those that none shows are not.
        capabilities: what an engine declares; what needs others is left out.
    """
    patterns = [part.strip() for part in pattern.split(",")]
    return [
        requirement
        for requirement in load_registry().values()
        if any(fnmatchcase(requirement.id, part) for part in patterns)
        and (not levels or requirement.level in levels)
        and (not doors or _is_shown(requirement, doors))
        and (capabilities is None or not requirement.missing(capabilities))
    ]


def _is_shown(requirement: Requirement, doors: Collection[str]) -> bool:
    return not requirement.ref_only and any(door in doors for door in requirement.doors)


def explain(spec_id: str, tests: Path | None = None) -> str:
    """A requirement as Markdown: text, reason, public reports, planted faults, tests.

    Args:
        tests: folder whose tests are listed; the suite's own if None.

    Raises:
        ValueError: there is no such id; names those like it.
    """
    spec = load_spec()
    if spec_id not in spec.requirements:
        close = get_close_matches(spec_id.upper(), spec.requirements, n=4, cutoff=0.6)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"{spec_id!r} is no requirement of specification {spec.version}{hint}")
    folder = tests or _own_tests()
    namings = namings_in(folder) if folder else ()
    named_by = dict.fromkeys(naming.test for naming in namings if naming.spec_id == spec_id)
    return requirement_page(spec, spec.requirements[spec_id], tuple(named_by))


def _own_tests() -> Path | None:
    """A wheel ships the tests inside the package; in a checkout they are the folder `tests`."""
    here = Path(__file__).parent
    shipped, checkout = here / "suite", here.parents[2] / "tests"
    if shipped.is_dir():
        return shipped
    return checkout if (checkout.parent / "src" / "nanovllm").is_dir() else None


def validate_markers(items: Iterable[MarkedItem]) -> list[str]:
    """A line for each collected test that names what is no requirement."""
    return unknown_ids(namings_of_items(items), load_registry())


def main(arguments: list[str] | None = None) -> int:
    """The command of this module; 1 if something is out of step."""
    parser = argparse.ArgumentParser(prog="python -m nanovllm.conformance.registry")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="generate the page")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="fail if it is not current")
    parser.add_argument("--lint", type=Path, metavar="TESTS", help="fail if a must has no test")
    options = parser.parse_args(arguments)
    spec = load_spec()
    problems = []
    if options.write:
        options.write.write_text(spec_page(spec), encoding="utf-8")
    if options.check and not _is_current(options.check, spec):
        problems.append(f"{options.check} is not current: write it again with --write")
    if options.lint:
        problems += lint(namings_in(options.lint), spec.requirements)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _is_current(page: Path, spec: Spec) -> bool:
    return page.is_file() and page.read_text(encoding="utf-8") == spec_page(spec)


if __name__ == "__main__":
    sys.exit(main())
