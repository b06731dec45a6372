"""Curves: in braille dots and block characters for a terminal, and as a PNG."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.text import Text

from rollouts.config.spelling import nearest_names
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.record import Record
from rollouts.inspect.terminal import format_number, make_safe

DOT_BITS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))  # Unicode braille
BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")  # of the runs, in turn
DRAWN = 2000  # points of a curve of a PNG
SHOWN_NAMES = 8  # of metrics that an error lists


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one stage of one run."""

    run: str
    stage: str
    name: str
    steps: np.ndarray  # ascending
    values: np.ndarray


def collect_panels(
    records: Mapping[str, Record], patterns: Sequence[str], *, stage: str | None = None
) -> list[list[Curve]]:
    """A panel for each stage and metric that matches a pattern: its curve of each run that has it.

    Raises ConfigError for a stage that no run has, and for a pattern that no metric of these stages matches.
    """
    curves = [curve for run, record in records.items() for curve in list_curves(run, record)]
    stages = list(dict.fromkeys(curve.stage for curve in curves))
    if stage is not None and stage not in stages:
        raise ConfigError(f"--stage {stage}: the stages are {', '.join(stages) or 'none yet'}")
    stages = [stage] if stage is not None else stages
    names = list(dict.fromkeys(curve.name for curve in curves if curve.stage in stages))
    chosen = dict.fromkeys(name for pattern in patterns for name in match_names(pattern, names))
    panels = [
        [curve for curve in curves if (curve.stage, curve.name) == (one, name)]
        for one in stages
        for name in chosen
    ]
    return [panel for panel in panels if panel]


def list_curves(run: str, record: Record) -> list[Curve]:
    """Every metric of every stage of a run that has a value, those of evaluations too."""
    curves = [
        Curve(run, stage.name, name, *stage.series(name))
        for stage in record.stages.values()
        for name in stage.metrics
    ]
    points: dict[tuple[str, str], dict[int, float]] = {}
    for row in record.evaluations:
        for name, value in row.items():
            if name.startswith("eval/"):
                points.setdefault((row["stage"], name), {})[row["step"]] = value
    for (stage, name), held in points.items():
        steps = np.array(sorted(held))
        curves.append(Curve(run, stage, name, steps, np.array([held[step] for step in steps.tolist()])))
    return curves


def match_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that match. Raises ConfigError naming the nearest ones if none does."""
    if found := [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
        return found
    known = list(dict.fromkeys(name.partition("/")[0] for name in names))
    areas = nearest_names(pattern.partition("/")[0], known)
    near = [] if "*" in pattern else nearest_names(pattern, names)
    near = near or [name for name in names if name.partition("/")[0] in areas] or list(names)
    hint = f"near are {', '.join(near[:SHOWN_NAMES])}" if near else "none was logged yet"
    raise ConfigError(f"{pattern}: no metric that was logged is called so; {hint}")


def prepare_curve(curve: Curve, *, smooth: int = 1, log: bool = False) -> Curve:
    """The curve as it is drawn: each value the mean of `smooth` up to it; with `log` only values above 0."""
    held = curve.values > 0 if log else np.ones(len(curve.values), dtype=bool)
    return Curve(
        curve.run, curve.stage, curve.name, curve.steps[held], smooth_values(curve.values[held], smooth)
    )


def smooth_values(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and the up to `window` - 1 before it."""
    if window <= 1 or not len(values):
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    return (sums[ends] - sums[begins]) / (ends - begins)


def mean_by_range(steps: np.ndarray, values: np.ndarray, *, first: int, last: int, ranges: int) -> np.ndarray:
    """The mean in each of up to `ranges` equal ranges of the steps from `first` to `last`; NaN for none."""
    count = min(ranges, last - first + 1)
    places = (steps - first) * count // (last - first + 1)
    sums, held = np.bincount(places, weights=values, minlength=count), np.bincount(places, minlength=count)
    return np.divide(sums, held, out=np.full(count, np.nan), where=held > 0)


def draw_sparkline(steps: np.ndarray, values: np.ndarray, *, first: int, last: int, width: int) -> str:
    """`width` block characters: the height of each is the mean of its range of steps; a blank has no step."""
    means = mean_by_range(steps, values, first=first, last=last, ranges=width)
    low, high = np.nanmin(means), np.nanmax(means)
    shares = (means - low) / (high - low) if high > low else means * 0 + 0.5
    top = len(BLOCKS) - 1
    return "".join(" " if np.isnan(share) else BLOCKS[min(top, int(share * len(BLOCKS)))] for share in shares)


def draw_chart(
    panel: Sequence[Curve],
    *,
    width: int = 72,
    height: int = 10,
    smooth: int = 1,
    log: bool = False,
    title: str = "",
) -> Text:
    """The curves over each other in braille, with highest and lowest value and the range of steps."""
    curves = [prepare_curve(curve, smooth=smooth, log=log) for curve in panel]
    drawn = [curve for curve in curves if len(curve.values)]
    title = title or f"{panel[0].stage} {panel[0].name}{' (logarithmic)' if log else ''}"
    if not drawn:
        return Text(f"{title}: no value is above 0, so that none has a logarithm")
    scaled = [np.log10(curve.values) if log else curve.values for curve in drawn]
    low, high = min(float(values.min()) for values in scaled), max(float(values.max()) for values in scaled)
    first, last = min(int(curve.steps[0]) for curve in drawn), max(int(curve.steps[-1]) for curve in drawn)
    cells, owners = np.zeros((height, width), np.int64), np.zeros((height, width), np.int64)
    for curve, values in zip(drawn, scaled, strict=True):
        means = mean_by_range(curve.steps, values, first=first, last=last, ranges=2 * width)
        dots = place_dots(means, low=low, high=high, columns=2 * width, rows=4 * height)
        bits = (dots.reshape(height, 4, width, 2) * DOT_BITS[:, None, :]).sum(axis=(1, 3))
        cells |= bits
        owners[bits > 0] = curves.index(curve)
    ends = [format_number(10**value if log else value) for value in (high, low)]
    labels = [ends[0], *[""] * (height - 2), ends[1]]
    margin = max(map(len, ends))
    text = Text(f"{'':>{margin}}  {title}\n")
    for label, row, owner in zip(labels, cells, owners, strict=True):
        text.append(f"{label:>{margin}} ┤")
        for cell, number in zip(row.tolist(), owner.tolist(), strict=True):
            text.append(chr(0x2800 + cell), COLOURS[number % len(COLOURS)])
        text.append("\n")
    text.append(f"{'':>{margin}}  {first}{f'step {last}':>{width - len(str(first))}}")
    if len(curves) > 1:
        text.append(f"\n{'':>{margin}}  ")
        for number, curve in enumerate(curves):
            text.append(f"━ {curve.run}  ", COLOURS[number % len(COLOURS)])
    return text


def place_dots(means: np.ndarray, *, low: float, high: float, columns: int, rows: int) -> np.ndarray:
    """[rows, columns] bool: the dots of a line without gaps, straight between the means."""
    held = np.flatnonzero(~np.isnan(means))
    places = held * (columns - 1) // max(1, len(means) - 1)
    inside = np.arange(places[0], places[-1] + 1)
    values = np.interp(inside, places, means[held])
    shares = (values - low) / (high - low) if high > low else np.full(len(inside), 0.5)
    lines = rows - 1 - np.rint(shares * (rows - 1))
    halfway = (lines[:-1] + lines[1:]) / 2
    sides = np.stack([lines, np.append(lines[:1], halfway), np.append(halfway, lines[-1:])])
    begins, ends = np.ceil(sides.min(axis=0)), np.floor(sides.max(axis=0))
    dots = np.zeros((rows, columns), dtype=bool)
    numbers = np.arange(rows)[:, None]
    dots[:, inside] = (numbers >= begins) & (numbers <= ends)
    return dots


def save_png(panels: Sequence[Sequence[Curve]], path: Path, *, smooth: int = 1, log: bool = False) -> None:
    """Writes the panels as a PNG, a column for each stage.

    Raises RunDirError if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunDirError(
            "a picture needs matplotlib; install it: pip install 'rollouts-rl[plot]'"
        ) from error
    stages: dict[str, list[Sequence[Curve]]] = {}
    for panel in panels:
        stages.setdefault(panel[0].stage, []).append(panel)
    height = max(map(len, stages.values()))
    figure = Figure(figsize=(max(7.5, 5.5 * len(stages)), 2.2 * height + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(height, len(stages), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for column, own in enumerate(stages.values()):
        for row, panel in enumerate(own):
            axes = grid[row][column]
            axes.set_axis_on()
            axes.set_title(make_safe(f"{panel[0].stage}: {panel[0].name}"), fontsize=9)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3)
            for curve in (prepare_curve(curve, smooth=smooth, log=log) for curve in panel):
                marker = "." if len(curve.steps) < 30 else None
                places = thin_out(curve.values)
                axes.plot(
                    curve.steps[places],
                    curve.values[places],
                    linewidth=1.4,
                    marker=marker,
                    label=make_safe(curve.run),
                )
            if log:
                axes.set_yscale("log")
            if len(panel) > 1:
                axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error}; name another file with --png FILE") from error


def thin_out(values: np.ndarray) -> np.ndarray:
    """Places of at most DRAWN values that look like all: the lowest and the highest of each stretch."""
    stretch = -(-2 * len(values) // DRAWN)
    if stretch <= 2:
        return np.arange(len(values))
    kept: set[int] = set()
    for begin in range(0, len(values), stretch):
        part = values[begin : begin + stretch]
        kept |= {begin + int(part.argmin()), begin + int(part.argmax())}
    return np.array(sorted(kept))
