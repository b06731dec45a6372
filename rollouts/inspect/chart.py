"""Curves of chosen metrics of one or several runs: in braille dots on a terminal, and as a PNG."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from rollouts.config.spelling import nearest_names
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.read import RunRecord
from rollouts.inspect.sparklines import format_number, mean_by_range

DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Unicode braille: 4 rows of 2 dots
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")  # of the runs, in turn
SHOWN_NAMES = 8  # of metrics that an error lists


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one stage of one run."""

    run: str
    stage: str
    name: str
    steps: np.ndarray  # ascending
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class ChartOptions:
    """How curves are drawn."""

    width: int = 72  # characters of the curve, labels left out
    height: int = 10  # lines
    smooth: int = 1  # each value is the mean of this many, up to it
    log: bool = False  # the logarithm of the values, to base 10; those that are not above 0 are left out


def collect_panels(
    records: Mapping[str, RunRecord], patterns: Sequence[str], *, stage: str | None = None
) -> list[list[Curve]]:
    """A panel for each stage and metric that matches a pattern (`reward/*`), in the order of the patterns:
    its curve of each run that has it.

    Raises ConfigError for a stage that no run has, and for a pattern that no metric of these stages matches.
    """
    stages = list(dict.fromkeys(name for record in records.values() for name in list_stages(record)))
    if stage is not None and stage not in stages:
        raise ConfigError(f"--stage {stage}: the stages are {', '.join(stages) or 'none yet'}")
    kept = [stage] if stage is not None else stages
    curves = [
        curve for run, record in records.items() for curve in list_curves(run, record) if curve.stage in kept
    ]
    names = list(dict.fromkeys(curve.name for curve in curves))
    chosen = list(dict.fromkeys(name for pattern in patterns for name in match_names(pattern, names)))
    panels = [
        [curve for curve in curves if (curve.stage, curve.name) == (one, name)]
        for one in kept
        for name in chosen
    ]
    return [panel for panel in panels if panel]


def list_stages(record: RunRecord) -> list[str]:
    """Stages that have a metric or an evaluation."""
    return list(dict.fromkeys([*record.stages, *(row["stage"] for row in record.evaluations)]))


def list_curves(run: str, record: RunRecord) -> list[Curve]:
    """Every metric of every stage of a run that has a value, those of evaluations too."""
    curves = [
        Curve(run, stage, name, *record.series(stage, name))
        for stage in record.stages
        for name in record.columns.metrics
    ]
    held: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in record.evaluations:
        for name, value in row.items():
            if name.startswith("eval/") and isinstance(value, int | float):
                held.setdefault((row["stage"], name), []).append((row["step"], value))
    for (stage, name), points in held.items():
        curves.append(
            Curve(
                run,
                stage,
                name,
                np.array([step for step, _ in points]),
                np.array([value for _, value in points], dtype=float),
            )
        )
    return [curve for curve in curves if len(curve.values)]


def match_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that match. Raises ConfigError naming the nearest ones if none does."""
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if found:
        return found
    areas = nearest_names(
        pattern.partition("/")[0], list(dict.fromkeys(name.partition("/")[0] for name in names))
    )
    alike = [] if "*" in pattern else nearest_names(pattern, names)
    near = (alike or [name for name in names if name.partition("/")[0] in areas] or list(names))[:SHOWN_NAMES]
    hint = f"near are {', '.join(near)}" if near else "none was logged yet"
    raise ConfigError(f"{pattern}: no metric that was logged is called so; {hint}")


def prepare_curve(curve: Curve, options: ChartOptions) -> Curve:
    """The curve as it is drawn: without what has no logarithm, smoothed. In the units of the metric."""
    if options.log:
        held = curve.values > 0
        curve = replace(curve, steps=curve.steps[held], values=curve.values[held])
    return replace(curve, values=smooth_values(curve.values, options.smooth))


def smooth_values(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and the up to `window` - 1 before it."""
    if window <= 1 or not len(values):
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    return (sums[ends] - sums[begins]) / (ends - begins)


def draw_chart(panel: Sequence[Curve], options: ChartOptions, *, colours: Sequence[str] = COLOURS) -> Text:
    """The curves of a panel over each other, with the highest and lowest value and the range of steps; where
    dots meet, the last run's colour.
    """
    curves = [prepare_curve(curve, options) for curve in panel]
    drawn = [curve for curve in curves if len(curve.values)]
    title = f"{panel[0].stage} {panel[0].name}{' (logarithmic)' if options.log else ''}"
    if not drawn:
        return Text(f"{title}: no value is above 0, so that none has a logarithm")
    scaled = [np.log10(curve.values) if options.log else curve.values for curve in drawn]
    low, high = min(float(values.min()) for values in scaled), max(float(values.max()) for values in scaled)
    first, last = min(int(curve.steps[0]) for curve in drawn), max(int(curve.steps[-1]) for curve in drawn)
    cells = np.zeros((options.height, options.width), dtype=np.int64)
    owners = np.zeros((options.height, options.width), dtype=np.int64)
    for curve, values in zip(drawn, scaled, strict=True):
        owner = curves.index(curve) if len(curves) > 1 else 0
        for row, column, bit in place_dots(
            curve.steps, values, first=first, last=last, low=low, high=high, options=options
        ):
            cells[row, column] |= bit
            owners[row, column] = owner
    ends = [format_number(10**value if options.log else value) for value in (high, low)]
    labels = [ends[0], *[""] * (options.height - 2), ends[1]]
    return lay_out(title, labels, cells, owners, (first, last), curves, colours)


def place_dots(
    steps: np.ndarray,
    values: np.ndarray,
    *,
    first: int,
    last: int,
    low: float,
    high: float,
    options: ChartOptions,
) -> list[tuple[int, int, int]]:
    """(line, character, bit) of the dots of a line without gaps. In each of the 2 × width columns of dots it
    is at the mean of the values in the column's range of steps, or on the straight line between those beside
    it where there is none; it rises and falls halfway between columns.
    """
    means = mean_by_range(steps, values, first=first, last=last, ranges=2 * options.width)
    held = np.flatnonzero(~np.isnan(means))
    places = held * (2 * options.width - 1) // max(1, len(means) - 1)
    columns = np.arange(places[0], places[-1] + 1)
    lowest = 4 * options.height - 1
    shares = (
        (np.interp(columns, places, means[held]) - low) / (high - low)
        if high > low
        else np.full(len(columns), 0.5)
    )
    rows = lowest - np.rint(shares * lowest)
    halfway = (rows[:-1] + rows[1:]) / 2
    before, after = np.concatenate([rows[:1], halfway]), np.concatenate([halfway, rows[-1:]])
    begins = np.ceil(np.minimum(rows, np.minimum(before, after))).astype(int)
    ends = np.floor(np.maximum(rows, np.maximum(before, after))).astype(int)
    spans = zip(columns.tolist(), begins.tolist(), ends.tolist(), strict=True)
    return [
        (row // 4, column // 2, DOT_BITS[row % 4][column % 2])
        for column, begin, end in spans
        for row in range(begin, end + 1)
    ]


def lay_out(
    title: str,
    labels: Sequence[str],
    cells: np.ndarray,
    owners: np.ndarray,
    span: tuple[int, int],
    curves: Sequence[Curve],
    colours: Sequence[str],
) -> Text:
    """Title, lines of braille with their labels, steps, and which colour is which run where there are
    several.
    """
    margin = max(len(label) for label in labels)
    text = Text(f"{'':>{margin}}  {title}\n")
    for label, row, owner in zip(labels, cells, owners, strict=True):
        text.append(f"{label:>{margin}} ┤")
        for cell, number in zip(row, owner, strict=True):
            text.append(chr(0x2800 + int(cell)), colours[int(number) % len(colours)])
        text.append("\n")
    first, last = span
    text.append(f"{'':>{margin}}  {first}{f'step {last}':>{cells.shape[1] - len(str(first))}}")
    if len(curves) > 1:
        text.append(f"\n{'':>{margin}}  ")
        for number, curve in enumerate(curves):
            text.append(f"━ {curve.run}  ", colours[number % len(colours)])
    return text


def save_charts(panels: Sequence[Sequence[Curve]], options: ChartOptions, path: Path) -> None:
    """Writes the panels as a PNG at `path`, one below the other.

    Raises RunDirError if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunDirError(
            "--png needs matplotlib, which is not installed; install it with: pip install 'rollouts-rl[plot]'"
        ) from error
    figure = Figure(figsize=(7.5, 2.6 * len(panels) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        draw_axes(axes, [prepare_curve(curve, options) for curve in panel], log=options.log)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise RunDirError(
            f"--png {path} cannot be written: {error}; name a file in a directory that exists"
        ) from error


def draw_axes(axes: Any, curves: Sequence[Curve], *, log: bool) -> None:
    """A panel on matplotlib axes."""
    axes.set_title(f"{curves[0].stage}: {curves[0].name}", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    for curve in curves:
        axes.plot(
            curve.steps,
            curve.values,
            linewidth=1.4,
            marker="." if len(curve.steps) < 30 else None,
            label=curve.run,
        )
    if log and any(len(curve.values) for curve in curves):
        axes.set_yscale("log")
    if len(curves) > 1:
        axes.legend(fontsize=8)
