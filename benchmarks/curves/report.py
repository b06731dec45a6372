"""docs/curves.md and its pictures, from the files in benchmarks/results/curves."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves.bars import Bar, Job

COLOURS = 64  # of a picture, which keeps it small
Results = Mapping[str, Mapping[str, Any]]  # name of a run → what its file holds
HEAD = """# Training curves

Runs of `integration_training/train.py` and what they had to show. `make curves` makes them again, `python -m
benchmarks.curves NAME` one of them. This page is written by that program from `benchmarks/results/curves/`,
which also holds the curves as numbers; the jobs and their bars are in `benchmarks/curves/jobs.toml`, the task
in `benchmarks/curves/tasks.py`.

*First* and *last* are means over the first and the last quarter of the steps (the last third where the bar
says so), or the first and the last evaluation. *Errors*: their difference in standard errors, as if steps
were independent. *Load* is that of the machine when the run began: other work shared it. Each panel has one
metric of one job over its steps, thin as measured and thick as a running mean, one colour a seed.
"""


def read_results(jobs: Mapping[str, Job], folder: Path) -> dict[str, dict[str, Any]]:
    """The results there are, by the name of the run, in the order of the jobs."""
    paths = {name: folder / f"{name}.json" for job in jobs.values() for name in job.run_names()}
    return {
        name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()
    }


def write_report(jobs: Mapping[str, Job], folder: Path, docs: Path) -> bool:
    """Writes docs/curves.md and docs/curves/GROUP.png. Whether every bar of every result is met."""
    results = read_results(jobs, folder)
    sections = [HEAD]
    for group in dict.fromkeys(job.group for job in jobs.values()):
        members = [
            job
            for job in jobs.values()
            if job.group == group and any(name in results for name in job.run_names())
        ]
        if members:
            picture = f"curves/{group.lower().replace(' ', '_')}.png"
            draw_group(members, results, docs / picture)
            sections.append(format_group(group, members, results, picture))
    sections += ["## Commands\n", *(format_command(name, result) for name, result in results.items())]
    (docs / "curves.md").write_text("\n".join(sections), encoding="utf-8")
    return all(verdict["met"] for result in results.values() for verdict in result["verdicts"])


def format_group(group: str, jobs: Sequence[Job], results: Results, picture: str) -> str:
    """A section: what the jobs are, a table of verdicts, the picture."""
    lines = [f"## {group}", "", *(f"- **{job.name}**: {job.about}" for job in jobs), ""]
    lines += ["| run | bar | first | last | errors | met |", "|---|---|---|---|---|---|"]
    names = [name for job in jobs for name in job.run_names() if name in results]
    lines += [format_verdict(name, verdict) for name in names for verdict in results[name]["verdicts"]]
    return "\n".join([*lines, "", f"![{group}]({picture})", ""])


def format_verdict(name: str, verdict: Mapping[str, Any]) -> str:
    """One line of a table."""
    errors = f"{verdict['errors']:.1f}" if verdict["errors"] is not None else ""
    return (
        f"| {name} | {verdict['bar']} | {verdict['first']:.4g} | {verdict['last']:.4g} | {errors} |"
        f" {'yes' if verdict['met'] else '**no**'} |"
    )


def format_command(name: str, result: Mapping[str, Any]) -> str:
    """What was run, when, where and how long."""
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    where = f"{result['date']}, {result['wall_s']:.0f} s, {result['machine']}, load {result['load']:g}"
    return f"**{name}**: {where}; {versions}\n\n```sh\n{shlex.join(result['command'])}\n```\n"


def draw_group(jobs: Sequence[Job], results: Results, path: Path) -> None:
    """A PNG with a panel for each job and metric of its steps; what a bar allows is a band. Nothing where no
    job has such a metric.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    panels = [
        (job, bar)
        for job in jobs
        for bar in {bar.metric: bar for bar in job.bars if not bar.metric.startswith("eval/")}.values()
    ]
    if not panels:
        return
    columns, rows = min(3, len(panels)), math.ceil(len(panels) / 3)
    figure = Figure(figsize=(3.2 * columns, 2.1 * rows), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for place in axes[len(panels) :]:
        place.set_axis_off()
    for place, (job, bar) in zip(axes, panels, strict=False):
        draw_panel(place, job, bar, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.draw()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(COLOURS).save(
        path, optimize=True
    )


def draw_panel(axes: Any, job: Job, bar: Bar, results: Results) -> None:
    """One metric of one job, a colour for each seed, on matplotlib axes."""
    axes.set_title(f"{job.name}: {bar.metric}", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    for index, name in enumerate(name for name in job.run_names() if name in results):
        curve = results[name]["curves"][bar.metric]
        axes.plot(curve["steps"], curve["values"], linewidth=0.6, alpha=0.4, color=f"C{index}")
        values = np.array(curve["values"])
        window = min(25, max(1, len(values) // 10))
        smoothed = [values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)]
        axes.plot(curve["steps"], smoothed, linewidth=1.4, color=f"C{index}")
    if bar.kind in ("near", "beyond"):
        axes.axhspan(bar.target - bar.tolerance, bar.target + bar.tolerance, alpha=0.15, color="C2")
