"""`nanovllm study`: the tutorial's open questions, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nanovllm.cli.terminal import stderr, usage_errors


def study(
    name: Annotated[str | None, typer.Argument(help="A study, or 'all'.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it: .svg, .png or .pdf; needs matplotlib.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Put tables and plot into this page, between its marks.")
    ] = None,
) -> None:
    """Measure one of the tutorial's open questions; without a name, list them.

    Seconds to a minute on a CPU each; docs/questions.md discusses what comes out.

    Examples:

      nanovllm study
      nanovllm study block-size --plot block-size.svg
    """
    from nanovllm.study import STUDIES, study_of

    if name is None:
        for known in STUDIES:
            typer.echo(f"{known.name:<14}{known.question}")
        return
    with usage_errors():
        if plot and name == "all":
            raise ValueError("--plot draws one study, not all")
        chosen = STUDIES if name == "all" else (study_of(name),)
        for each in chosen:
            with stderr().status(each.name):
                findings = each.run()
            typer.echo(f"# {each.name}: {each.question}\n\n{findings.markdown()}\n")
            if plot:
                findings.save_plot(plot)
            if page:
                from nanovllm.study.page import update

                update(page, each.name, findings)
