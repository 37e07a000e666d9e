"""What a run is asked for: one declaration for the command line, pytest and the report.

A field is an option of `nanovllm conformance run` and of `pytest`; its annotation is the help.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from random import SystemRandom
from typing import Annotated, Any, get_args, get_type_hints

LEVELS = ("must", "should", "may")
DOORS = ("blocks", "core", "engine", "gpu", "perf")
PROFILES = ("dev", "ci", "deep")
REPORT_SUFFIXES = (".json", ".html", ".md", ".xml", ".svg")

CHOICES: dict[str, tuple[str, ...]] = {"door": DOORS, "level": LEVELS, "profile": PROFILES}


@dataclass(frozen=True)
class RunOptions:
    """The options of a run.

    Raises:
        ValueError: a value is none of the choices, or a file cannot be used.
    """

    engine: Annotated[
        str,
        "reference, nanovllm_like, hf, vllm, module:factory, path.py:factory, or cmd:PROGRAM.",
    ]
    engine_path: Annotated[Path | None, "Directory of the engine under test."] = None
    engine_python: Annotated[Path | None, "Interpreter that runs the engine."] = None
    engine_option: Annotated[tuple[str, ...], "k=v for the engine; may be repeated."] = ()
    door: Annotated[
        tuple[str, ...], "blocks, core, engine, gpu or perf; default: all that the engine has."
    ] = ()
    level: Annotated[str, "must, or also should, or also may."] = "should"
    req: Annotated[tuple[str, ...], "Requirements, as ids or patterns such as 'PFX-*'."] = ()
    profile: Annotated[str, "Examples: dev 30, ci 100 derandomised, deep 5,000."] = "ci"
    seed: Annotated[int | None, "Seed of the examples; by default 0 for ci, or drawn."] = None
    known_failures: Annotated[Path | None, "TOML file of failures that are known."] = None
    known_failures_write: Annotated[Path | None, "Write what fails as such a file."] = None
    replay: Annotated[Path | None, "Replay this trace, and run nothing else."] = None
    report: Annotated[
        tuple[Path, ...], "Write a report: .json, .html, .md, .xml (JUnit), .svg (badge)."
    ] = ()
    strict: Annotated[bool, "Fail if a selected requirement was not exercised."] = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            given = getattr(self, name)
            for value in (given,) if isinstance(given, str) else given:
                if value not in allowed:
                    raise ValueError(f"--{name} {value}: must be one of {', '.join(allowed)}")
        for path in self.report:
            if path.suffix not in REPORT_SUFFIXES:
                raise ValueError(f"--report {path}: must end in {', '.join(REPORT_SUFFIXES)}")
        for name in ("engine_path", "engine_python", "known_failures", "replay"):
            path = getattr(self, name)
            if path is not None and not path.exists():
                raise ValueError(f"{flag(name)} {path}: there is no such file")
        self.engine_options()

    def with_seed(self) -> RunOptions:
        """The seed is drawn now, if it is to be, so that a report can name it."""
        if self.seed is not None:
            return self
        return replace(self, seed=0 if self.profile == "ci" else SystemRandom().randrange(2**32))

    @property
    def levels(self) -> tuple[str, ...]:
        return LEVELS[: LEVELS.index(self.level) + 1]

    @property
    def pattern(self) -> str:
        return ",".join(self.req) or "*"

    def engine_options(self) -> dict[str, Any]:
        """`--engine-option` as a mapping; a value is JSON, or else a string."""
        options: dict[str, Any] = {}
        for pair in self.engine_option:
            name, separator, value = pair.partition("=")
            if not name or not separator:
                raise ValueError(f"--engine-option {pair}: must be NAME=VALUE")
            try:
                options[name] = json.loads(value)
            except json.JSONDecodeError:
                options[name] = value
        return options

    def command(self, *more: str) -> str:
        """A command line that tests the same engine in the same way, to be pasted into a shell."""
        words = ["nanovllm", "conformance", "run"]
        for name in ("engine", "engine_path", "engine_python", "engine_option"):
            words += self._words(name)
        return shlex.join([*words, *more])

    def rerun(self, spec_id: str) -> str:
        """The command that generates the examples of one requirement again."""
        return self.command(
            "--req", spec_id, *self._words("profile"), *self._words("seed"), "--level", "may"
        )

    def _words(self, name: str) -> list[str]:
        value = getattr(self, name)
        values = value if isinstance(value, tuple) else (value,)
        return [word for v in values if v is not None for word in (flag(name), str(v))]


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """A field of `RunOptions` as an option of a command line."""

    field: Field[Any]
    type: Any
    help: str

    @property
    def flag(self) -> str:
        return flag(self.field.name)

    @property
    def required(self) -> bool:
        return self.field.default is MISSING

    @property
    def repeats(self) -> bool:
        return self.field.default == ()

    @property
    def value_type(self) -> type:
        """Type of one value."""
        named = (self.type, *get_args(self.type))
        return next(t for t in (Path, int, bool, str) if t in named)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def option_specs() -> list[OptionSpec]:
    hints = get_type_hints(RunOptions, include_extras=True)
    return [OptionSpec(f, *get_args(hints[f.name])) for f in fields(RunOptions) if f.name in hints]
