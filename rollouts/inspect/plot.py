"""The curves that every run has, on a terminal, and a picture with more of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from rollouts.errors import RunDirError
from rollouts.inspect.chart import ChartOptions, Curve, draw_chart
from rollouts.inspect.read import RunRecord, series
from rollouts.inspect.table import ACCURACY
from rollouts.inspect.terminal import make_safe
from rollouts.metrics.jsonl import Row

CURVES = (("reward/mean", "reward"), ("loss/total", "loss"))
HEIGHT = 8  # lines of a curve on a terminal
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


def draw_curves(record: RunRecord, *, width: int = 60) -> list[Text]:
    """Reward and loss of every stage that has at least two steps of it."""
    curves = [
        Curve("", stage, label, *record.series(stage, name))
        for stage in record.stages
        for name, label in CURVES
    ]
    return [
        draw_chart([curve], ChartOptions(width=width, height=HEIGHT))
        for curve in curves
        if len(curve.values) > 1
    ]


def save_png(record: RunRecord, path: Path) -> None:
    """Writes the curves of every stage as a PNG at `path`: a column per stage, a panel per metric that it
    has, its evaluations last.

    Raises RunDirError if the run has no steps yet, if matplotlib is not installed, or if the file cannot be
    written.
    """
    if not record.metrics and not record.evaluations:
        raise RunDirError(f"{record.root} has no steps and no evaluations yet; there is nothing to plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunDirError(
            "--png needs matplotlib, which is not installed; install it with: pip install 'rollouts-rl[plot]'"
        ) from error
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
        raise RunDirError(
            f"--png {path} cannot be written: {error}; name a file in a directory that exists"
        ) from error


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
    """At most DRAWN points that look like all of them: of each stretch of steps the lowest and the highest
    value, in their order.
    """
    stretch = -(-2 * len(values) // DRAWN)
    if stretch <= 2:
        return steps, values
    kept: list[int] = []
    for begin in range(0, len(values), stretch):
        inside = range(begin, min(begin + stretch, len(values)))
        kept += sorted({min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)})
    return [steps[index] for index in kept], [values[index] for index in kept]


def choose_evaluations(record: RunRecord, stage: str) -> list[Row]:
    """The evaluations of a stage, and as step 0 of each name the last one made before it, of the model that
    it started from.
    """
    own = [row for row in record.evaluations if row["stage"] == stage]
    if not own:
        return [{**row, "step": 0} for row in record.evaluations[-1:]]
    earlier = record.evaluations[: record.evaluations.index(own[0])]
    begun = {row.get("name") for row in own if row["step"] == 0}
    before = {
        row.get("name"): row
        for row in earlier
        if row.get("name") in {other.get("name") for other in own} - begun
    }
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
        axes.plot(steps, values, marker="o", label=make_safe(label))
    axes.set_ylim(0, 100)
    if lines:
        axes.legend(fontsize=8)


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over the last tenth of the values, at least 1 and at most 25 of them."""
    window = min(25, max(1, len(values) // 10))
    sums = [sum(values[max(0, index + 1 - window) : index + 1]) for index in range(len(values))]
    return [total / min(window, index + 1) for index, total in enumerate(sums)]
