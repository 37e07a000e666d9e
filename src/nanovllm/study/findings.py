"""What a study has found: tables as Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Draw = Callable[[Any], None]
"""Draws on an empty `matplotlib.figure.Figure`."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are printed; the first column says what a line is of."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Padded, so that it reads as well where nobody renders it."""
        grid = [self.columns, *self.lines]
        widths = [max(len(line[i]) for line in grid) for i in range(len(self.columns))]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        padded = [
            [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs)]
            for pairs in (list(zip(line, widths, strict=True)) for line in grid)
        ]
        rows = [padded[0], rule, *padded[1:]]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(row)} |" for row in rows)])


@dataclass(frozen=True, slots=True)
class Findings:
    """What one study found.

    Attributes:
        remarks: sentences below the tables.
        size: of the plot, in inches.
    """

    tables: tuple[Table, ...]
    remarks: tuple[str, ...]
    draw: Draw
    size: tuple[float, float] = (9.0, 3.4)

    def markdown(self) -> str:
        return "\n\n".join([*(table.markdown() for table in self.tables), *self.remarks])

    def save_plot(self, path: Path) -> None:
        """As SVG, PNG or whatever the name ends with; the same bytes each time.

        Raises ValueError without matplotlib, or for an ending that it does not know.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ValueError(
                "plots need matplotlib: pip install 'nanovllm[study]' (or matplotlib)"
            ) from error
        style = {
            "svg.hashsalt": "nanovllm",
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
        }
        dateless = {"Date": None} if path.suffix == ".svg" else {}
        with rc_context(style):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            figure.savefig(path, dpi=110, metadata=dateless)


def checked(evaluations: Sequence[int]) -> str:
    """The sentence on how often the suite looked, from each run's total."""
    return f"{sum(evaluations):,} checks of the suite while this ran; none failed."
