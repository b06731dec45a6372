"""Curves of a run: in braille dots on a terminal, and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.errors import RunDirError
from rollouts.inspect.read import RunRecord, series
from rollouts.inspect.table import ACCURACY
from rollouts.metrics.jsonl import Row

DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Unicode braille: 4 rows of 2 dots
CURVES = (("reward/mean", "reward"), ("loss/total", "loss"))
EVALUATIONS = "evaluations"
DRAWN = 2000  # points of a curve of the PNG, which is 600 dots wide
PANELS = (  # of the PNG: metric, title
    ("reward/mean", "reward"),
    ("loss/total", "loss"),
    ("response_length/mean", "response length, tokens"),
    ("entropy/mean", "entropy, nats"),
    ("rewards/margins", "margin of rewards"),
    ("value/explained_variance", "explained variance of values"),
    ("optim/grad_norm", "gradient norm"),
    ("time/step", "seconds per step"),
)


def draw_curve(steps: Sequence[int], values: Sequence[float], *, title: str, width: int = 60, height: int = 8) -> str:
    """A curve as text: a title, `height` lines of `width` characters with 2 x 4 dots each, labelled with the extremes, and the step range.

    A dot column shows the mean of the values that fall into it, so that no step is left out of a long run. Empty for no values.
    """
    assert len(steps) == len(values), (len(steps), len(values))
    if not values:
        return ""
    low, high = min(values), max(values)
    columns = mean_by_column(steps, values, 2 * width)
    bits = [[0] * width for _ in range(height)]
    for column, value in columns.items():
        share = (value - low) / (high - low) if high > low else 0.5
        dot = (4 * height - 1) - round(share * (4 * height - 1))
        bits[dot // 4][column // 2] |= DOT_BITS[dot % 4][column % 2]
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(len(label) for label in labels)
    lines = [f"{label:>{margin}} ┤{''.join(chr(0x2800 + cell) for cell in row)}" for label, row in zip(labels, bits, strict=True)]
    span = f"{steps[0]}{f'step {steps[-1]}':>{width - len(str(steps[0]))}}"
    return "\n".join([f"{'':>{margin}}  {title}", *lines, f"{'':>{margin}}  {span}"])


def mean_by_column(steps: Sequence[int], values: Sequence[float], columns: int) -> dict[int, float]:
    """The mean value in each of `columns` equal ranges of steps, those that hold a step; column 0 holds the first, the last one the last."""
    first, last = min(steps), max(steps)
    held: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        column = (step - first) * (columns - 1) // (last - first) if last > first else 0
        held.setdefault(column, []).append(value)
    return {column: sum(inside) / len(inside) for column, inside in held.items()}


def draw_curves(record: RunRecord, *, width: int = 60, height: int = 8) -> str:
    """Reward and loss of every stage that has at least two steps of it, one below the other."""
    drawn: list[str] = []
    for stage in record.stages:
        for name, label in CURVES:
            steps, values = series(record.stage_rows(stage), name)
            if len(values) > 1:
                drawn.append(draw_curve(steps, values, title=f"{stage} {label}", width=width, height=height))
    return "\n\n".join(drawn)


def save_png(record: RunRecord, path: Path) -> None:
    """Writes the curves of every stage as a PNG at `path`: a column per stage, a panel per metric that it has, its evaluations last.

    Raises RunDirError if the run has no steps yet, if matplotlib is not installed, or if the file cannot be written.
    """
    if not record.metrics and not record.evaluations:
        raise RunDirError(f"{record.root} has no steps and no evaluations yet; there is nothing to plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunDirError("--png needs matplotlib, which is not installed; install it with: pip install 'rollouts-rl[plot]'") from error
    columns = {stage: choose_panels(record, stage) for stage in record.stages or (EVALUATIONS,)}
    height = max(len(panels) for panels in columns.values())
    figure = Figure(figsize=(5.5 * len(columns), 2.2 * height + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(height, len(columns), squeeze=False)
    for column, (stage, panels) in enumerate(columns.items()):
        for row in range(height):
            if row < len(panels):
                draw_panel(axes[row][column], record, stage, *panels[row])
            else:
                axes[row][column].set_axis_off()
    figure.suptitle(record.root.name)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise RunDirError(f"--png {path} cannot be written: {error}; name a file in a directory that exists") from error


def choose_panels(record: RunRecord, stage: str) -> list[tuple[str, str]]:
    """Metric and title of each panel of a stage: those of PANELS that it has, and its evaluations."""
    panels = [(name, title) for name, title in PANELS if series(record.stage_rows(stage), name)[1]]
    return [*panels, (EVALUATIONS, "accuracy, %")] if record.evaluations else panels or [PANELS[0]]


def draw_panel(axes: Any, record: RunRecord, stage: str, name: str, title: str) -> None:
    """One metric of one stage on matplotlib axes."""
    axes.set_title(f"{stage}: {title}", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if name == EVALUATIONS:
        draw_evaluations(axes, choose_evaluations(record, stage))
        return
    steps, values = thin_out(*series(record.stage_rows(stage), name))
    axes.plot(steps, values, linewidth=0.8, alpha=0.5, marker="." if len(steps) < 30 else None)
    axes.plot(steps, smooth(values), linewidth=1.6)


def thin_out(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """At most DRAWN points that look like all of them: of each stretch of steps the lowest and the highest value, in their order."""
    stretch = -(-2 * len(values) // DRAWN)
    if stretch <= 2:
        return steps, values
    kept: list[int] = []
    for begin in range(0, len(values), stretch):
        inside = range(begin, min(begin + stretch, len(values)))
        kept += sorted({min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)})
    return [steps[index] for index in kept], [values[index] for index in kept]


def choose_evaluations(record: RunRecord, stage: str) -> list[Row]:
    """The evaluations of a stage, and as step 0 of each name the last one made before it, of the model that it started from."""
    own = [row for row in record.evaluations if row["stage"] == stage]
    if not own:
        return [{**row, "step": 0} for row in record.evaluations[-1:]]
    earlier = record.evaluations[: record.evaluations.index(own[0])]
    begun = {row.get("name") for row in own if row["step"] == 0}
    before = {row.get("name"): row for row in earlier if row.get("name") in {other.get("name") for other in own} - begun}
    return [*({**row, "step": 0} for row in before.values()), *own]


def draw_evaluations(axes: Any, rows: Sequence[Row]) -> None:
    """Accuracy over steps, one line per evaluation and statistic, on matplotlib axes."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if match := ACCURACY.fullmatch(name):
                steps, values = lines.setdefault(f"{match['name']} {match['stat']}", ([], []))
                steps.append(row["step"])
                values.append(100 * value)
    for label, (steps, values) in lines.items():
        axes.plot(steps, values, marker="o", label=label)
    axes.set_ylim(0, 100)
    if lines:
        axes.legend(fontsize=8)


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over the last tenth of the values, at least 1 and at most 25 of them."""
    window = min(25, max(1, len(values) // 10))
    sums = [sum(values[max(0, index + 1 - window) : index + 1]) for index in range(len(values))]
    return [total / min(window, index + 1) for index, total in enumerate(sums)]
