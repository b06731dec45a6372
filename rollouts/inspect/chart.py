"""Curves: in braille dots for a terminal, and as a PNG."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from rollouts.config.spelling import nearest_names
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.record import Curve, Record
from rollouts.inspect.terminal import format_number, make_safe

DOT_BITS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))  # Unicode braille
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")  # of the runs, in turn
SHOWN_NAMES = 8  # of metrics that an error lists
# metrics and evaluations of a stage, or of all, those of stages that have steps first
NAMES = """
    SELECT stage, name FROM totals LEFT JOIN stages USING (stage)
    WHERE name GLOB ? AND stage = ifnull(?, stage)
    ORDER BY stages.rowid, name"""


def collect_panels(
    records: Mapping[str, Record],
    patterns: Sequence[str],
    *,
    stage: str | None = None,
    smooth: int = 1,
    log: bool = False,
) -> list[list[Curve]]:
    """A panel for each stage and metric that matches a pattern: its curve of each run that has it, as
    read_curve makes it.

    Raises ConfigError for a pattern that no metric of the stage matches.
    """
    panels: dict[tuple[str, str], dict[str, Curve]] = {}
    for pattern in patterns:
        wanted = [pattern, stage]
        found = [(run, *row.values()) for run, of in records.items() for row in of.rows(NAMES, wanted)]
        if not found:
            rows = [row for record in records.values() for row in record.rows(NAMES, ["*", None])]
            stages, names = (list(dict.fromkeys(row[part] for row in rows)) for part in ("stage", "name"))
            near = (nearest_names(pattern, names, count=SHOWN_NAMES) or names)[:SHOWN_NAMES]
            raise ConfigError(
                f"{pattern}: no metric that was logged is called so{f' in stage {stage}' if stage else ''};"
                f" near are {', '.join(near) or 'none'}; the stages are {', '.join(stages) or 'none yet'}"
            )
        for run, of, name in found:
            curve = records[run].read_curve(of, name, run, smooth=smooth, log=log)
            panels.setdefault((of, name), {})[run] = curve
    return [list(curves.values()) for curves in panels.values()]


def draw_chart(panel: Sequence[Curve], *, width: int = 72, height: int = 10, log: bool = False) -> Text:
    """The curves over each other in braille, with highest and lowest value and the range of steps."""
    title = f"{panel[0].stage} {panel[0].name}{' (logarithmic)' if log else ''}"
    steps, values = (np.concatenate([curve[field] for curve in panel]) for field in (2, 3))
    if not len(values):
        return Text(f"{title}: no value is above 0, so that none has a logarithm")
    low, high, first, last = values.min(), values.max(), steps.min(), steps.max()
    scale = np.log if log else np.asarray
    cells, owners = np.zeros((2, height, width), np.int64)
    for number, curve in enumerate(panel):
        if not len(curve.values):
            continue
        columns = np.rint((curve.steps - first) * (2 * width - 1) / max(1, last - first)).astype(np.int64)
        held, places = np.unique(columns, return_inverse=True)
        means = np.bincount(places, curve.values) / np.bincount(places)
        # straight from mean to mean, by more points than there are dots: a line has no gaps
        fine = np.linspace(held[0], held[-1], 16 * width * height)
        heights = np.interp(fine, held, scale(means)) - scale(low)
        shares = heights / (scale(high) - scale(low)) if high > low else heights + 0.5
        dots = np.zeros((4 * height, 2 * width), dtype=bool)
        dots[np.rint((1 - shares) * (4 * height - 1)).astype(int), np.rint(fine).astype(int)] = True
        bits = (dots.reshape(height, 4, width, 2) * DOT_BITS[:, None, :]).sum(axis=(1, 3))
        cells |= bits
        owners[bits > 0] = number
    labels = [format_number(high), *[""] * (height - 2), format_number(low)]
    margin = max(map(len, labels))
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(panel))]
    text = Text(f"{'':>{margin}}  {title}\n")
    for label, row, owner in zip(labels, cells.tolist(), owners.tolist(), strict=True):
        drawn = [(chr(0x2800 + cell), colours[number]) for cell, number in zip(row, owner, strict=True)]
        text = Text.assemble(text, f"{label:>{margin}} ┤", *drawn, "\n")
    text.append(f"{'':>{margin}}  {first}{f'step {last}':>{width - len(str(first))}}")
    for curve, colour in zip(panel if len(panel) > 1 else (), colours, strict=False):
        text.append(f"\n  ━ {curve.run}", colour)
    return text


def save_png(panels: Sequence[Sequence[Curve]], path: Path, *, log: bool = False) -> None:
    """Writes the panels as a PNG, a column for each stage.

    Raises RunDirError if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunDirError(
            "a picture needs matplotlib; install it: pip install 'rollouts-rl[plot]'"
        ) from error
    stages: dict[str, list[str]] = {}
    for panel in panels:
        stages.setdefault(panel[0].stage, []).append(f"{panel[0].stage}: {panel[0].name}")
    grid: Any = [list(row) for row in zip_longest(*stages.values(), fillvalue=".")]
    figure = Figure(figsize=(max(7.5, 5.5 * len(stages)), 2.2 * len(grid) + 0.6), layout="constrained")
    places = figure.subplot_mosaic(grid)
    for panel in panels:
        title = f"{panel[0].stage}: {panel[0].name}"
        axes = places[title]
        axes.set_title(make_safe(title), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        for curve in panel:
            marker = "." if len(curve.steps) < 30 else None
            axes.plot(curve.steps, curve.values, linewidth=1.4, marker=marker, label=make_safe(curve.run))
        axes.set_yscale("log" if log else "linear")
        if len(panel) > 1:
            axes.legend(fontsize=8)
    try:
        with rc_context({"agg.path.chunksize": 10_000}):  # of long lines
            figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error}; name another file with --png FILE") from error
