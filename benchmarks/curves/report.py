"""docs/curves.md and its pictures, from the files in benchmarks/results/curves."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.curves.bars import Job


def read_results(jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    """The results there are, by name, in the order of the jobs."""
    paths = {name: RESULTS / f"{name}.json" for job in jobs.values() for name in job.names()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def format_report(jobs: dict[str, Job], results: dict[str, dict[str, Any]]) -> str:
    """docs/curves.md."""
    lines = [
        "# Training curves",
        "",
        "Runs of `integration_training/train.py` and what they had to show; `make curves` makes them again, `python -m benchmarks.curves NAME` one of",
        "them. This page is written by `benchmarks/curves.py` from `benchmarks/results/curves/`, which also holds the curves as numbers; the jobs are",
        "in `benchmarks/curves/jobs.toml`. *First* and *last* are means over the first and last quarter of the steps (last third where the bar says",
        "so), or the first and last evaluation; *errors* is their difference in standard errors. *Load* is that of the machine when the run began.",
        "",
    ]
    for group in dict.fromkeys(job.group for job in jobs.values()):
        members = [job for job in jobs.values() if job.group == group and any(name in results for name in job.names())]
        if not any(job.bars for job in members):
            continue
        lines += [f"## {group}", "", *(f"- **{job.name}**: {job.about}" for job in members), ""]
        lines += ["| run | bar | first | last | errors | met |", "|---|---|---|---|---|---|"]
        for name in (name for job in members for name in job.names() if name in results):
            lines += [format_verdict(name, verdict) for verdict in results[name]["verdicts"]]
        lines += ["", f"![{group}](curves/{group}.png)", ""]
    lines += ["## Commands", ""]
    for name, result in results.items():
        versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
        lines += [f"`{result['command']}`  ", f"{name}: {result['date']}, {result['wall_s']:.0f} s, {result['machine']}, load {result['load']:g}; {versions}", ""]
    return "\n".join(lines)


def format_verdict(name: str, verdict: dict[str, Any]) -> str:
    """One line of a table."""
    errors = f"{verdict['errors']:.1f}" if verdict["errors"] is not None else ""
    return f"| {name} | {verdict['bar']} | {verdict['first']:.4g} | {verdict['last']:.4g} | {errors} | {'yes' if verdict['met'] else '**no**'} |"


def draw_group(jobs: Sequence[Job], results: dict[str, dict[str, Any]], path: Path) -> None:
    """A PNG with a panel per job and metric; a run is a thin line with its running mean, a band is what a bar allows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from rollouts.inspect.plot import smooth

    panels = [(job, bar) for job in jobs for bar in {bar.metric: bar for bar in job.bars}.values()]
    columns = min(3, len(panels))
    figure = Figure(figsize=(3.2 * columns, 2.1 * math.ceil(len(panels) / columns)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).ravel()
    for place in axes[len(panels) :]:
        place.set_axis_off()
    for place, (job, bar) in zip(axes, panels, strict=False):
        place.set_title(f"{job.name}: {bar.metric}", fontsize=8)
        place.tick_params(labelsize=7)
        place.grid(alpha=0.3)
        for index, name in enumerate(name for name in job.names() if name in results):
            curve = results[name]["curves"][bar.metric]
            steps = list(range(len(curve["values"]))) if bar.metric.startswith("eval/") else curve["steps"]
            place.plot(steps, curve["values"], linewidth=0.6, alpha=0.4, color=f"C{index}")
            place.plot(steps, smooth(curve["values"]), linewidth=1.4, color=f"C{index}")
        if bar.kind in ("near", "beyond"):
            place.axhspan(bar.target - bar.tolerance, bar.target + bar.tolerance, alpha=0.15, color="C2")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, format="png")


def write_report(jobs: dict[str, Job]) -> bool:
    """Writes page and pictures. Whether every bar of every result is met."""
    results = read_results(jobs)
    REPORT.write_text(format_report(jobs, results), encoding="utf-8")
    for group in dict.fromkeys(job.group for job in jobs.values()):
        members = [job for job in jobs.values() if job.group == group and job.bars and any(name in results for name in job.names())]
        if members:
            draw_group(members, results, PICTURES / f"{group}.png")
    return all(verdict["met"] for result in results.values() for verdict in result["verdicts"])
