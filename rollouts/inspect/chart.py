"""Curves: in braille dots and block characters for a terminal, and as a PNG."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.text import Text

from rollouts.config.spelling import nearest_names
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.record import Curve, Record
from rollouts.inspect.terminal import format_number, make_safe

DOT_BITS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))  # Unicode braille
BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")  # of the runs, in turn
SHOWN_NAMES = 8  # of metrics that an error lists
# metrics and evaluations, those of stages that have steps first
NAMES = "SELECT stage, name FROM totals LEFT JOIN stages USING (stage) ORDER BY stages.rowid, name"


def collect_panels(
    records: Mapping[str, Record], patterns: Sequence[str], *, stage: str | None = None
) -> list[list[Curve]]:
    """A panel for each stage and metric that matches a pattern: its curve of each run that has it.

    Raises ConfigError for a stage that no run has, and for a pattern that no metric of these stages matches.
    """
    held = {
        run: [(row["stage"], row["name"]) for row in record.rows(NAMES)] for run, record in records.items()
    }
    known = dict.fromkeys(key for keys in held.values() for key in keys)
    stages = dict.fromkeys(of for of, _ in known)
    if stage is not None and stage not in stages:
        raise ConfigError(f"--stage {stage}: the stages are {', '.join(stages) or 'none yet'}")
    known = [key for key in known if stage in (None, key[0])]
    names = list(dict.fromkeys(name for _, name in known))
    panels: dict[tuple[str, str], list[Curve]] = {}
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            near = nearest_names(pattern, names, count=SHOWN_NAMES) or names
            hint = f"near are {', '.join(near[:SHOWN_NAMES])}" if near else "none was logged yet"
            raise ConfigError(f"{pattern}: no metric that was logged is called so; {hint}")
        for key in (key for key in known if key[1] in found and key not in panels):
            panels[key] = [records[run].read_curve(*key, run=run) for run in records if key in held[run]]
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
    return curve._replace(steps=curve.steps[held], values=smooth_values(curve.values[held], smooth))


def compute_means(places: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """[count] the mean of the values at each place; NaN for none."""
    sums, held = np.bincount(places, weights=values, minlength=count), np.bincount(places, minlength=count)
    return np.divide(sums, held, out=np.full(count, np.nan), where=held > 0)


def draw_sparkline(means: np.ndarray) -> str:
    """Block characters: the height of each is that of a mean; a blank has none."""
    low, high = np.nanmin(means), np.nanmax(means)
    shares = (means - low) / (high - low) if high > low else means * 0 + 0.5
    return "".join(" " if np.isnan(share) else BLOCKS[min(7, int(share * 8))] for share in shares)


def draw_chart(
    panel: Sequence[Curve], *, width: int = 72, height: int = 10, smooth: int = 1, log: bool = False
) -> Text:
    """The curves over each other in braille, with highest and lowest value and the range of steps."""
    title = f"{panel[0].stage} {panel[0].name}{' (logarithmic)' if log else ''}"
    curves = [prepare_curve(curve, smooth=smooth, log=log) for curve in panel]
    steps, values = (np.concatenate([curve[field] for curve in curves]) for field in (2, 3))
    if not len(values):
        return Text(f"{title}: no value is above 0, so that none has a logarithm")
    low, high, first, last = values.min(), values.max(), steps.min(), steps.max()
    cells, owners = np.zeros((2, height, width), np.int64)
    for number, curve in enumerate(curves):
        if len(curve.values):
            places = np.rint((curve.steps - first) * (2 * width - 1) / max(1, last - first)).astype(np.int64)
            means = np.append([low, high], compute_means(places, curve.values, 2 * width))
            dots = place_dots(np.log(means) if log else means, rows=4 * height)
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


def place_dots(heights: np.ndarray, *, rows: int) -> np.ndarray:
    """[rows, columns] bool: the dots of a line without gaps, straight between the columns that have a height.

    heights: the lowest and the highest of the chart, then of each column, NaN for none.
    """
    (low, high), means = heights[:2], heights[2:]
    held = np.flatnonzero(~np.isnan(means))
    inside = np.arange(held[0], held[-1] + 1)
    shares = (np.interp(inside, held, means[held]) - low) / (high - low) if high > low else inside * 0 + 0.5
    lines = rows - 1 - np.rint(shares * (rows - 1))
    before = np.append(lines[:1], lines[:-1])  # a column reaches to beside the dot before it
    dots, numbers = np.zeros((rows, len(means)), dtype=bool), np.arange(rows)[:, None]
    dots[:, inside] = (numbers >= np.minimum(lines, before + 1)) & (numbers <= np.maximum(lines, before - 1))
    return dots


def save_png(panels: Sequence[Sequence[Curve]], path: Path, *, smooth: int = 1, log: bool = False) -> None:
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
    stages = list(dict.fromkeys(panel[0].stage for panel in panels))
    rows = Counter[str]()
    height = max(Counter(panel[0].stage for panel in panels).values())
    figure = Figure(figsize=(max(7.5, 5.5 * len(stages)), 2.2 * height + 0.6), layout="constrained")
    for panel in panels:
        stage = panel[0].stage
        axes = figure.add_subplot(height, len(stages), rows[stage] * len(stages) + stages.index(stage) + 1)
        rows[stage] += 1
        axes.set_title(make_safe(f"{stage}: {panel[0].name}"), fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        for curve in (prepare_curve(curve, smooth=smooth, log=log) for curve in panel):
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
