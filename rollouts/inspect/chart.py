"""Curves: in braille dots and block characters for a terminal, and as a PNG."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


def list_curves(run: str, record: Record) -> list[Curve]:
    """Every metric of every stage of a run that has a value, those of evaluations too."""
    points: dict[tuple[str, str], dict[int, float]] = {}
    for row in record.evaluations:
        for name, value in row.items():
            if name.startswith("eval/"):
                points.setdefault((row["stage"], name), {})[row["step"]] = value
    return [
        *(
            Curve(run, stage.name, name, *stage.series(name))
            for stage in record.stages.values()
            for name in stage.metrics
        ),
        *(
            Curve(run, *of, *map(np.array, zip(*sorted(held.items()), strict=True)))
            for of, held in points.items()
        ),
    ]


def collect_panels(
    records: Mapping[str, Record], patterns: Sequence[str], *, stage: str | None = None
) -> list[list[Curve]]:
    """A panel for each stage and metric that matches a pattern: its curve of each run that has it.

    Raises ConfigError for a stage that no run has, and for a pattern that no metric of these stages matches.
    """
    curves = [curve for run, record in records.items() for curve in list_curves(run, record)]
    stages = dict.fromkeys(curve.stage for curve in curves)
    if stage is not None and stage not in stages:
        raise ConfigError(f"--stage {stage}: the stages are {', '.join(stages) or 'none yet'}")
    curves = [curve for curve in curves if stage in (None, curve.stage)]
    names = list(dict.fromkeys(curve.name for curve in curves))
    panels: dict[tuple[str, str], list[Curve]] = {}
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            near = nearest_names(pattern, names, count=SHOWN_NAMES) or names
            hint = f"near are {', '.join(near[:SHOWN_NAMES])}" if near else "none was logged yet"
            raise ConfigError(f"{pattern}: no metric that was logged is called so; {hint}")
        for one in stages:
            for curve in curves:
                if curve.stage == one and curve.name in found:
                    panels.setdefault((one, curve.name), []).append(curve)
    return list(panels.values())


def smooth_values(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value and the up to `window` - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - window)
    return (sums[ends] - sums[begins]) / (ends - begins) if window > 1 else values


def prepare_curve(curve: Curve, *, smooth: int, log: bool) -> Curve:
    """The curve as it is drawn: each value the mean of `smooth` up to it; with `log` only values above 0."""
    held = curve.values > (0 if log else -np.inf)
    return replace(curve, steps=curve.steps[held], values=smooth_values(curve.values[held], smooth))


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
    return "".join(" " if np.isnan(share) else BLOCKS[min(7, int(share * 8))] for share in shares)


def draw_chart(
    panel: Sequence[Curve],
    *,
    width: int = 72,
    height: int = 10,
    smooth: int = 1,
    log: bool = False,
) -> Text:
    """The curves over each other in braille, with highest and lowest value and the range of steps."""
    title = f"{panel[0].stage} {panel[0].name}{' (logarithmic)' if log else ''}"
    curves = [prepare_curve(curve, smooth=smooth, log=log) for curve in panel]
    drawn = [(number, curve) for number, curve in enumerate(curves) if len(curve.values)]
    if not drawn:
        return Text(f"{title}: no value is above 0, so that none has a logarithm")
    every = np.concatenate([curve.values for _, curve in drawn])
    low, high = float(every.min()), float(every.max())
    first, last = (int(find(curve.steps[end] for _, curve in drawn)) for find, end in ((min, 0), (max, -1)))
    cells, owners = np.zeros((height, width), np.int64), np.zeros((height, width), np.int64)
    for number, curve in drawn:
        means = mean_by_range(curve.steps, curve.values, first=first, last=last, ranges=2 * width)
        heights = np.log([low, high, *means]) if log else np.array([low, high, *means])
        dots = place_dots(heights[2:], *heights[:2], columns=2 * width, rows=4 * height)
        bits = (dots.reshape(height, 4, width, 2) * DOT_BITS[:, None, :]).sum(axis=(1, 3))
        cells |= bits
        owners[bits > 0] = number
    labels = [format_number(high), *[""] * (height - 2), format_number(low)]
    margin = max(map(len, labels))
    text = Text(f"{'':>{margin}}  {title}\n")
    for label, row, owner in zip(labels, cells.tolist(), owners.tolist(), strict=True):
        text.append(f"{label:>{margin}} ┤")
        for cell, number in zip(row, owner, strict=True):
            text.append(chr(0x2800 + cell), COLOURS[number % len(COLOURS)])
        text.append("\n")
    text.append(f"{'':>{margin}}  {first}{f'step {last}':>{width - len(str(first))}}")
    for number, curve in enumerate(curves if len(curves) > 1 else ()):
        text.append(f"{'' if number else chr(10)}  ━ {curve.run}", COLOURS[number % len(COLOURS)])
    return text


def place_dots(means: np.ndarray, low: float, high: float, *, columns: int, rows: int) -> np.ndarray:
    """[rows, columns] bool: the dots of a line without gaps, straight between the means."""
    held = np.flatnonzero(~np.isnan(means))
    places = held * (columns - 1) // max(1, len(means) - 1)
    inside = np.arange(places[0], places[-1] + 1)
    values = np.interp(inside, places, means[held])
    shares = (values - low) / (high - low) if high > low else np.full(len(inside), 0.5)
    lines = rows - 1 - np.rint(shares * (rows - 1))
    halfway = (lines[:-1] + lines[1:]) / 2  # a dot's column reaches half the way to the dots beside it
    sides = np.stack([lines, np.append(lines[:1], halfway), np.append(halfway, lines[-1:])])
    dots, numbers = np.zeros((rows, columns), dtype=bool), np.arange(rows)[:, None]
    dots[:, inside] = (numbers >= np.ceil(sides.min(axis=0))) & (numbers <= np.floor(sides.max(axis=0)))
    return dots


def save_png(panels: Sequence[Sequence[Curve]], path: Path, *, smooth: int = 1, log: bool = False) -> None:
    """Writes the panels as a PNG, a column for each stage.

    Raises RunDirError if matplotlib is not installed, or the file cannot be written.
    """
    try:
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
    for column, own in enumerate(stages.values()):
        for row, panel in enumerate(own):
            axes = figure.add_subplot(height, len(stages), row * len(stages) + column + 1)
            axes.set_title(make_safe(f"{panel[0].stage}: {panel[0].name}"), fontsize=9)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3)
            for curve in (prepare_curve(curve, smooth=smooth, log=log) for curve in panel):
                marker, label = "." if len(curve.steps) < 30 else None, make_safe(curve.run)
                axes.plot(*thin_out(curve), linewidth=1.4, marker=marker, label=label)
            axes.set_yscale("log" if log else "linear")
            if len(panel) > 1:
                axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error}; name another file with --png FILE") from error


def thin_out(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of at most DRAWN points that look like all: lowest and highest of each stretch."""
    if len(curve.values) <= DRAWN:
        return curve.steps, curve.values
    starts = np.arange(0, len(curve.values), -(-2 * len(curve.values) // DRAWN))
    ends = [find.reduceat(curve.values, starts) for find in (np.minimum, np.maximum)]
    return np.repeat(curve.steps[starts], 2), np.stack(ends, axis=1).ravel()
