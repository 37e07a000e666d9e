"""What `spec.toml` holds: requirements, their groups, and whether the file makes sense."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from nanovllm.conformance.protocol import CAPABILITIES, Door

SPEC_FILE = Path(__file__).with_name("spec.toml")

Level = Literal["must", "should", "may"]

ID = re.compile(r"([A-Z]{2,3})-([1-9][0-9]*)([a-z]?)")
VERSION = re.compile(r"[0-9]+\.[0-9]+")
EXAMPLE = re.compile(r"([\w.-]+)#([1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One promise of an engine, with all that a report says about it.

    Attributes:
        id: never reused, also after its requirement is gone.
        why: what goes wrong otherwise.
        level: what a deviation is: a failure (must), a remark (should), nothing (may).
        doors: through which it can be judged, the most direct one first.
        capabilities: what an engine must declare for it to apply; all of them.
        since: version of the specification that brought it.
        should: policy that goes with it; a deviation is a remark.
        reference: what our own engine promises beyond it.
        ref_only: no door shows it; unit tests of the reference do.
        pending: what has to be built before this project can test it; empty if it is tested.
        examples: public reports of engines without it, as `vllm#11829`.
        faults: planted faults that it has to convict.
        needs: ids without which this one cannot be judged; if one fails, this is `blocked`.
    """

    id: str
    title: str
    text: str
    why: str
    level: Level
    doors: tuple[Door, ...]
    capabilities: tuple[str, ...]
    since: str
    should: str = ""
    reference: str = ""
    ref_only: bool = False
    pending: str = ""
    examples: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_each(self.id, "id", [self.id], ID)
        _check_each(self.id, "since", [self.since], VERSION)
        _check_each(self.id, "example", self.examples, EXAMPLE)
        _check_known(self.id, "level", [self.level], get_args(Level))
        _check_known(self.id, "door", self.doors, get_args(Door))
        _check_known(self.id, "capability", self.capabilities, CAPABILITIES)
        for name in ("title", "text", "why", "doors"):
            if not getattr(self, name):
                raise ValueError(f"{self.id}: {name} is empty")
        for name in ("doors", "capabilities", "examples", "faults", "needs"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{self.id}: {name} has one twice: {', '.join(values)}")

    @property
    def group(self) -> str:
        return self.id.partition("-")[0]

    @property
    def door(self) -> Door:
        return self.doors[0]

    def missing(self, declared: Collection[str]) -> tuple[str, ...]:
        """Capabilities it needs that are not declared; it is `unsupported` if there are any."""
        return tuple(name for name in self.capabilities if name not in declared)


@dataclass(frozen=True, slots=True)
class Group:
    """Requirements about one thing; `about` is Markdown."""

    name: str
    title: str
    about: str

    def __post_init__(self) -> None:
        if not self.title:
            raise ValueError(f"{self.name}: title is empty")


@dataclass(frozen=True, slots=True)
class Spec:
    """The whole specification, in the order in which it is read."""

    version: str
    groups: Mapping[str, Group]
    requirements: Mapping[str, Requirement]
    repositories: Mapping[str, str]


def load_spec(path: Path = SPEC_FILE) -> Spec:
    """Read and validate a specification.

    Raises:
        ValueError: naming the requirement and what is wrong with it.
    """
    return parse_spec(path.read_text(encoding="utf-8"))


def parse_spec(text: str) -> Spec:
    """See `load_spec`. A table named twice is an error of TOML itself, also a ValueError."""
    data = tomllib.loads(text)
    tables = {"version", "repositories", "groups", "requirements"}
    if data.keys() != tables:
        raise ValueError(f"there are {', '.join(data)}; it takes {', '.join(sorted(tables))}")
    groups, requirements = {}, {}
    defaults: dict[str, dict[str, Any]] = {}
    for name, table in data["groups"].items():
        groups[name] = Group(name, table.pop("title", ""), table.pop("about", ""))
        _check_known(name, "default", table, ("doors", "capabilities", "since", "ref_only"))
        defaults[name] = table
    for spec_id, table in data["requirements"].items():
        group = spec_id.partition("-")[0]
        _check_known(spec_id, "group", [group], defaults)
        requirements[spec_id] = _requirement(spec_id, table, defaults[group])
    spec = Spec(
        data["version"],
        MappingProxyType(groups),
        MappingProxyType(requirements),
        MappingProxyType(data["repositories"]),
    )
    _check_whole(spec)
    return spec


def _requirement(spec_id: str, table: dict[str, Any], group: dict[str, Any]) -> Requirement:
    given = {"level": "must", **group, **table}
    # What a group needs, each of its requirements needs too.
    given["capabilities"] = [*group.get("capabilities", []), *table.get("capabilities", [])]
    _check_known(spec_id, "key", given, [f.name for f in fields(Requirement)][1:])
    for field in fields(Requirement):
        value = given.get(field.name)
        if value is not None:
            given[field.name] = _typed(spec_id, field.name, str(field.type), value)
    try:
        return Requirement(id=spec_id, **given)
    except TypeError as error:
        raise ValueError(f"{spec_id}: {error}") from None


def _typed(spec_id: str, name: str, annotation: str, value: object) -> object:
    """A value of TOML as the field's type; lines of prose are joined."""
    if annotation == "bool" and isinstance(value, bool):
        return value
    if annotation.startswith("tuple") and isinstance(value, list):
        return tuple(str(entry) for entry in value)
    if annotation in ("str", "Level") and isinstance(value, str):
        return " ".join(value.split())
    raise ValueError(f"{spec_id}: {name} must be a {annotation}, got {value!r}")


def _check_whole(spec: Spec) -> None:
    _check_each("spec", "version", [spec.version], VERSION)
    for requirement in spec.requirements.values():
        spec_id = requirement.id
        _check_known(spec_id, "need", requirement.needs, spec.requirements)
        names = [example.partition("#")[0] for example in requirement.examples]
        _check_known(spec_id, "repository", names, spec.repositories)
        if _version(requirement.since) > _version(spec.version):
            raise ValueError(f"{spec_id}: since {requirement.since}, after {spec.version}")
    _check_acyclic(spec)


def _check_acyclic(spec: Spec) -> None:
    """One that needs itself would be blocked for ever."""
    done: set[str] = set()

    def visit(spec_id: str, path: tuple[str, ...]) -> None:
        if spec_id in path:
            raise ValueError(f"{spec_id}: needs itself, by {' -> '.join((*path, spec_id))}")
        if spec_id not in done:
            for need in spec.requirements[spec_id].needs:
                visit(need, (*path, spec_id))
            done.add(spec_id)

    for spec_id in spec.requirements:
        visit(spec_id, ())


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _check_each(where: str, what: str, values: Collection[str], pattern: re.Pattern[str]) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise ValueError(f"{where}: {what} {value!r} is not of the form {pattern.pattern}")


def _check_known(where: str, what: str, values: Collection[str], known: Collection[str]) -> None:
    if unknown := [value for value in values if value not in known]:
        raise ValueError(
            f"{where}: unknown {what} {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
