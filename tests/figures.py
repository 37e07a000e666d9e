"""Figures that tests report: a table each at the end of the run, and JSON if it is asked for.

`NANOVLLM_EQUALITY_REPORT=FILE` writes them there.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]
FIGURES = pytest.StashKey[dict[str, list[Row]]]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> dict[str, list[Row]]:
    """Rows of the tables of the final report, by title of the table."""
    return pytestconfig.stash.setdefault(FIGURES, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    figures = config.stash.get(FIGURES, {})
    for title, rows in sorted(figures.items()):
        rows.sort(key=lambda row: str(list(row.values())))
        terminalreporter.section(title)
        for line in table(rows):
            terminalreporter.write_line(line)
    if figures and (path := os.environ.get("NANOVLLM_EQUALITY_REPORT")):
        Path(path).write_text(json.dumps(figures, indent=1))


def table(rows: list[Row]) -> list[str]:
    """Aligned columns under their names, and the sums of those that count."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    cells = []
    for name, values in columns.items():
        total = sum(values) if all(isinstance(value, int) for value in values) else ""
        column = [name, *(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)]
        width = max(map(len, [*column, str(total)]))
        cells.append([cell.rjust(width) for cell in [*column, str(total)]])
    return ["  ".join(line).rstrip() for line in zip(*cells, strict=True)]
