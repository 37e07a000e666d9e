"""Pictures of a run over time, as a PNG or as one HTML page. Needs the extra `bench`."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.bench.recorder import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".html")
MAX_WINDOWS, STEPS_PER_WINDOW = 100, 5

Records = Sequence[StepRecord]

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>nanovllm bench</title>
<style>body {{ font: 15px sans-serif; max-width: 60em; margin: 2em auto }}
svg {{ width: 100%; height: auto }} td, th {{ padding: 0 1em 0 0; text-align: left }}</style>
</head><body><h1>nanovllm bench</h1>
<table>{machine}</table>
{plots}
</body></html>
"""


def write_plots(
    path: Path, runs: Iterable[tuple[str, Records]], machine: Mapping[str, Any]
) -> None:
    """One group of four panels per run that has steps, titled by its name.

    Raises ValueError for a suffix that is none of `SUFFIXES`, if matplotlib is not there, and if no
    run has steps.
    """
    check_plot_path(path)
    figures = [draw_run(name, records) for name, records in runs if records]
    if not figures:
        raise ValueError("no run has steps to draw")
    if path.suffix.lower() == ".html":
        rows = "".join(
            f"<tr><th>{html.escape(name)}<td>{html.escape(str(value))}"
            for name, value in machine.items()
        )
        plots = "\n".join(_svg(figure) for figure in figures)
        path.write_text(PAGE.format(machine=rows, plots=plots), encoding="utf-8")
        return
    path.write_bytes(_stacked_png(figures))


def check_plot_path(path: Path) -> None:
    """ValueError if nothing could be drawn there: better before a measurement than after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot writes {' or '.join(SUFFIXES)}, not {path.name!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib: pip install 'nanovllm[bench]' ({error})"
        ) from error


def draw_run(name: str, records: Records) -> Figure:
    """Tokens a second, where step time goes, the queues, the cache."""
    # Not pyplot: it would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(name)
    panels: tuple[Callable[[Axes, Records], None], ...] = (_rates, _times, _queues, _cache)
    for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
        panel(axes, records)
        axes.set_xlabel("s")
        axes.set_xlim(0, records[-1].end)
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", fontsize="small")
    return figure


def _rates(axes: Axes, records: Records) -> None:
    axes.set_title("tokens a second")
    count = max(1, min(MAX_WINDOWS, len(records) // STEPS_PER_WINDOW))
    width = records[-1].end / count
    edges = [i * width for i in range(count + 1)]
    decoded, prefilled = [0] * count, [0] * count
    for record in records:
        window = min(int(record.end / width), count - 1)
        decoded[window] += record.num_decode_tokens
        prefilled[window] += record.num_prefill_tokens
    axes.stairs([tokens / width for tokens in decoded], edges, label="decoded")
    # Often ten times as many, and seldom.
    axes.plot([], color="C1", label="prefilled (right axis)")
    right = axes.twinx()
    right.stairs([tokens / width for tokens in prefilled], edges, color="C1")
    right.set_ylim(bottom=0)


def _edges(records: Records) -> list[float]:
    """Between which each step lies, so that a single one is seen too."""
    return [0.0, *(record.end for record in records)]


def _times(axes: Axes, records: Records) -> None:
    axes.set_title("ms a step")
    edges = _edges(records)
    wall = [1e3 * record.seconds for record in records]
    device = [1e3 * min(record.device_seconds, record.seconds) for record in records]
    if any(device):
        axes.stairs(device, edges, fill=True, label="device")
        axes.stairs(wall, edges, baseline=device, fill=True, label="exposed host")
    else:
        axes.stairs(wall, edges, label="wall")


def _queues(axes: Axes, records: Records) -> None:
    axes.set_title("requests")
    edges = _edges(records)
    preempted, total = [], 0
    for record in records:
        total += record.num_preempted
        preempted.append(total)
    axes.stairs([record.num_running for record in records], edges, label="running")
    axes.stairs([record.num_waiting for record in records], edges, label="waiting")
    axes.stairs(preempted, edges, label="preemptions so far")


def _cache(axes: Axes, records: Records) -> None:
    axes.set_title("KV cache, %")
    edges = _edges(records)
    used = [100 * record.num_used_blocks / record.num_blocks for record in records]
    hits = [100 * record.num_cached_tokens / max(record.num_lookup_tokens, 1) for record in records]
    axes.stairs(used, edges, label="blocks in use")
    axes.stairs(hits, edges, label="prompt tokens found")
    axes.set_ylim(top=100)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _stacked_png(figures: list[Figure]) -> bytes:
    """One picture below the other."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    images = []
    for figure in figures:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
        buffer.seek(0)
        images.append(imread(buffer))
    stacked = np.concatenate(images)
    height, width = stacked.shape[:2]
    whole = Figure(figsize=(width / 100, height / 100))
    whole.figimage(stacked)
    buffer = io.BytesIO()
    whole.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
