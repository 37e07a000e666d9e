"""`nanovllm conformance`: test an engine, and read what is tested.

Whatever takes time to import is imported by the command that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from nanovllm.cli.terminal import ExitCode, report_error, stderr, usage_errors
from nanovllm.conformance.options import CHOICES, OptionSpec, RunOptions, option_specs

if TYPE_CHECKING:
    from nanovllm.conformance.report import Report


def conformance_app() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    app.callback()(_about)
    for command in (run, check, init, doctor, explain, list_):
        app.command(command.__name__.rstrip("_"))(command)
    return app


def _about() -> None:
    """Does an inference engine do what it must? Any engine, in its own process.

    nanovllm conformance run --engine reference
    nanovllm conformance run --engine nanovllm_like --engine-path ~/nano-vllm
    nanovllm conformance explain PFX-6
    """


def _with_run_options(*names: str) -> Callable[[Callable[[RunOptions], None]], Callable[..., None]]:
    """Makes a command for typer whose options are these fields of `RunOptions`; all if none."""
    specs = [spec for spec in option_specs() if not names or spec.field.name in names]

    def decorate(command: Callable[[RunOptions], None]) -> Callable[..., None]:
        def flat(**values: Any) -> None:
            for spec in specs:
                if spec.repeats:
                    values[spec.field.name] = tuple(values[spec.field.name])
            with usage_errors():
                options = RunOptions(**values)
            command(options)

        flat.__name__, flat.__doc__ = command.__name__, command.__doc__
        flat.__signature__ = Signature(list(map(_parameter, specs)))  # type: ignore[attr-defined]
        return flat

    return decorate


def _parameter(spec: OptionSpec) -> Parameter:
    name, value_type = spec.field.name, spec.value_type
    metavar = "|".join(CHOICES[name]) if name in CHOICES and not spec.repeats else None
    default: Any = Parameter.empty if spec.required else spec.field.default
    kind: Any = value_type | None if default is None else value_type
    if spec.repeats:
        kind, default = list[value_type], []  # type: ignore[valid-type]
    option = typer.Option(spec.flag, help=spec.help, metavar=metavar, show_default=bool(default))
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


@_with_run_options()
def run(options: RunOptions) -> None:
    """Test an engine: one verdict for each requirement, a story for each failure.

    Exit code 1 if a must fails, if nothing was evaluated, or if a known failure passes.
    """
    from nanovllm.conformance.parts import replay, suite_parts
    from nanovllm.conformance.run import NotTestable, SuiteRun

    with stderr().status("") as status:

        def tell(message: str) -> None:
            status.update(Text(message))

        try:
            with usage_errors():
                report = SuiteRun(options, suite_parts(), replay, tell=tell).run()
        except NotTestable as error:
            report_error(str(error))
            raise typer.Exit(ExitCode.USAGE) from error
    _conclude(report, strict=options.strict)


def _conclude(report: Report, *, strict: bool = False) -> None:
    from nanovllm.conformance.reports.terminal import print_report

    print_report(report, Console(highlight=False), strict=strict)
    if report.problems(strict=strict):
        raise typer.Exit(ExitCode.SOME_FAILED)


def check(
    log: Annotated[Path, typer.Argument(metavar="LOG.jsonl", exists=True, dir_okay=False)],
    req: Annotated[list[str] | None, typer.Option(help="Ids, or patterns such as 'PFX-*'.")] = None,
    report: Annotated[
        list[Path] | None, typer.Option(help="Write a report: .json, .html, .md, .xml, .svg.")
    ] = None,
) -> None:
    """Judge the log of an engine that has run by itself; no adapter is needed.

    docs/protocol.md says what a line holds.
    """
    from nanovllm.conformance.log_report import report_of_log
    from nanovllm.conformance.report import write_reports

    with usage_errors():
        found = report_of_log(log, ",".join(req or ()) or "*")
        write_reports(found, report or ())
    _conclude(found)


def list_(
    pattern: Annotated[str, typer.Argument(help="Ids, or patterns such as 'PFX-*'.")] = "*",
    level: Annotated[list[str] | None, typer.Option(help="must, should, may.")] = None,
    door: Annotated[list[str] | None, typer.Option(help="core, engine, ...")] = None,
) -> None:
    """List the requirements: id, level, doors that show it, what it needs, title."""
    from nanovllm.conformance.registry import list_requirements

    found = list_requirements(pattern=pattern, levels=tuple(level or ()), doors=tuple(door or ()))
    if not found:
        report_error(f"no requirement is {pattern}")
        raise typer.Exit(ExitCode.USAGE)
    for requirement in found:
        doors = "reference" if requirement.ref_only else ",".join(requirement.doors)
        needs = f" [{', '.join(requirement.capabilities)}]" if requirement.capabilities else ""
        typer.echo(
            f"{requirement.id:<8}{requirement.level:<8}{doors:<13}{requirement.title}{needs}"
        )


def explain(
    spec_id: Annotated[str, typer.Argument(metavar="ID")],
    story: Annotated[bool, typer.Option(help="Run an engine that gets it wrong.")] = True,
) -> None:
    """Explain a requirement: what, why, public bugs, and the story of an engine without it."""
    from rich.markdown import Markdown

    from nanovllm.conformance.registry import explain as page_of

    with usage_errors():
        page = page_of(spec_id)
    if story:
        with stderr().status("an engine that gets it wrong"):
            from nanovllm.conformance.faulty_story import faulty_story

            page += faulty_story(spec_id)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Markdown(page))
    else:
        typer.echo(page)


def init(
    target: Annotated[Path, typer.Argument(metavar="FILE")] = Path("conformance_adapter.py"),
) -> None:
    """Write a commented adapter to start from."""
    from nanovllm.conformance.template import write_template

    with usage_errors():
        write_template(target)
    typer.echo(f"Fill in {target}, then:")
    typer.echo(f"  nanovllm conformance doctor --engine {target}:adapter")
    typer.echo(f"  nanovllm conformance run --engine {target}:adapter")
    typer.echo(
        "--engine-path DIR if the engine is in another folder, --engine-python PY for its own"
    )


@_with_run_options("engine", "engine_path", "engine_python", "engine_option")
def doctor(options: RunOptions) -> None:
    """Ask an engine for all it can do: does it answer, and is what it declares what it does?

    Exit code 1 if something that it declares does not work.
    """
    from nanovllm.conformance.doctor import examine
    from nanovllm.conformance.run import open_engine

    with usage_errors(), open_engine(options) as door:
        report = examine(door)
    for line in report.lines():
        typer.echo(line)
    if report.problems:
        raise typer.Exit(ExitCode.SOME_FAILED)
