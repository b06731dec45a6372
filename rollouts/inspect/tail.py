"""The command `tail`: a run while it goes on, on one screen.

    files ──► FileCursor.read_new ──► RunView.take ──► draw_screen or describe_row (a line a step)

Rows are taken when they are whole. A long file is followed from its last START_BYTES on.
"""

from __future__ import annotations

import statistics
import time
import tomllib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import trio
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollouts.inspect.chart import draw_sparkline
from rollouts.inspect.overview import TROUBLE, describe_failure
from rollouts.inspect.record import open_run_dir
from rollouts.inspect.terminal import format_number, make_safe
from rollouts.metrics.jsonl import Row, has_place, parse_row
from rollouts.run_dir import Activity, RunDir, describe_activity, find_activity, list_parts

START_BYTES = 8 << 20  # of a file's end that is read at first
PACE_ROWS = 20  # rows whose times tell how long a step takes
PRINTED_ROWS = 20  # lines for one look: the first look finds the whole run
HELD_ROWS = 2000  # steps that the sparkline shows
FACTS = {
    "reward": "reward/mean",
    "loss": "loss/total",
    "grad norm": "optim/grad_norm",
    "length": "response_length/mean",
    "cut": "truncated/frac",
    "lag": "off_policy/max",
    "tok/s": "perf/generated_tokens_per_s",
    "s/step": "time/step",
}
COURSES = (
    "reward/mean",
    "rewards/accuracies",
    "loss/total",
)  # the sparkline is of the first that a stage has


@dataclass(slots=True)
class FileCursor:
    """How far one .jsonl file was read."""

    path: Path  # of the first part
    part: Path | None = None  # the one that is read
    offset: int = 0  # bytes of that part, always the beginning of a line

    def read_new(self) -> list[Row]:
        """The rows of the lines that were ended since, over parts that were begun since. Damaged ones are
        left out.
        """
        rows: list[Row] = []
        parts = list_parts(self.path)
        if self.part is None and parts:
            self.part = parts[-2] if len(parts) > 1 and parts[-1].stat().st_size < START_BYTES else parts[-1]
            self.offset = max(0, self.part.stat().st_size - START_BYTES)
        for part in parts[parts.index(self.part) :] if self.part in parts else ():
            if part != self.part:
                self.part, self.offset = part, 0
            with part.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
            end = data.rfind(b"\n") + 1
            self.offset += end
            found = (parse_row(line) for line in data[:end].split(b"\n"))
            rows += [row for row in found if row and has_place(row) and isinstance(row.get("stage"), str)]
        return rows


@dataclass(slots=True)
class RunView:
    """What the rows so far say."""

    root: Path
    steps: dict[str, int] = field(default_factory=dict)  # of the config, by stage
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)  # by stage and step, of the newest attempt
    attempts: dict[str, int] = field(default_factory=dict)  # the newest one that wrote a row, by stage
    evaluation: Row | None = None
    samples: deque[Row] = field(default_factory=lambda: deque(maxlen=5))
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    failures: dict[str, float] = field(default_factory=dict)  # of the rows that were read, by class
    engines: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # requests and tokens of the newest step
    engine_step: tuple[str, int] = ("", 0)

    def take_metrics(self, row: Row) -> None:
        """Takes a row of metrics in; an attempt that goes on from an earlier step replaces what came after
        it.
        """
        stage, step = row["stage"], row["step"]
        row = {
            name: value for name, value in row.items() if "/" not in name or isinstance(value, int | float)
        }
        if row["attempt"] > self.attempts.get(stage, 0):
            self.attempts[stage] = row["attempt"]
            again = [key for key in self.rows if key[0] == stage and key[1] >= step]
            for key in again:
                del self.rows[key]
            if again:
                self.warnings.append(f"{stage}: attempt {row['attempt']} goes on from step {step}")
        self.rows[stage, step] = row
        while len(self.rows) > HELD_ROWS:
            del self.rows[next(iter(self.rows))]
        for metric, value in row.items():
            if metric.startswith("fail/") and value:
                self.failures[metric[5:]] = self.failures.get(metric[5:], 0.0) + value
        for metric, what in TROUBLE.items():
            if row.get(metric):
                self.warnings.append(f"{stage} step {step}: {row[metric]:g} {what}")

    def take_sample(self, row: Row) -> None:
        """Takes a sample in."""
        self.samples.append(row)
        if row.get("status") == "failed":
            metadata = row.get("metadata")
            failure = describe_failure(metadata.get("failure") if isinstance(metadata, dict) else None)
            self.warnings.append(f"{row['stage']} step {row['step']}: {row.get('id', '')}: {failure}")

    def take_span(self, row: Row) -> None:
        """Takes a span in: of engines how much they answered in the newest step."""
        if row.get("name") != "generate" or not isinstance(row.get("tokens"), int):
            return
        if self.engine_step != (row["stage"], row["step"]):
            self.engine_step, self.engines = (row["stage"], row["step"]), {}
        requests, tokens = self.engines.get(str(row.get("track")), (0, 0))
        self.engines[str(row.get("track"))] = requests + 1, tokens + row["tokens"]

    @property
    def last(self) -> Row | None:
        """The newest row of metrics."""
        return next(reversed(self.rows.values()), None)


def read_steps(run_dir: RunDir) -> dict[str, int]:
    """Steps of each stage that the config asks for; nothing where it cannot be read."""
    try:
        settings = tomllib.loads(run_dir.config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tables = {name: table for name, table in settings.items() if isinstance(table, dict)}
    return {name: table["steps"] for name, table in tables.items() if isinstance(table.get("steps"), int)}


def estimate_left_s(view: RunView) -> float | None:
    """Seconds that the rest of the stage takes at the pace of its last rows; None where that is not known."""
    last = view.last
    if last is None or last["stage"] not in view.steps:
        return None
    own = [row for row in view.rows.values() if all(row[name] == last[name] for name in ("stage", "attempt"))]
    times = [row["time_unix"] for row in own[-PACE_ROWS:] if "time_unix" in row]
    if len(times) < 2:
        return None
    pace = statistics.median(after - before for before, after in pairwise(times))
    return max(0.0, pace * (view.steps[last["stage"]] - last["step"]))


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def list_facts(row: Row) -> list[str]:
    return [f"{heading} {format_number(row[metric])}" for heading, metric in FACTS.items() if metric in row]


def describe_row(view: RunView, row: Row) -> str:
    """A row of metrics on one line."""
    total = view.steps.get(row["stage"])
    return "  ".join([f"{row['stage']} {row['step']}{f'/{total}' if total else ''}", *list_facts(row)])


def draw_screen(view: RunView, activity: Activity, *, width: int, now_unix: float) -> Text:
    """What is known of the run, at most about 25 lines of `width` characters."""
    lines = [f"{view.root}: {describe_activity(activity)}"]
    last, evaluation = view.last, view.evaluation
    if last is None:
        lines.append("no step has ended yet")
    else:
        lines += draw_step(view, last, activity, width=width, now_unix=now_unix)
    if evaluation is not None:
        shown = [
            f"{name} {format_number(value)}"
            for name, value in evaluation.items()
            if name.startswith("eval/") and isinstance(value, float)
        ]
        lines.append(f"evaluated {evaluation['stage']} step {evaluation['step']}: {', '.join(shown[:4])}")
    if view.failures:
        ordered = sorted(view.failures.items(), key=lambda item: -item[1])
        lines.append(f"failed    {', '.join(f'{kind} {count:.0f}' for kind, count in ordered)}")
    for row in view.samples:
        reward = f"{row['reward']:.3g}" if isinstance(row.get("reward"), int | float) else "none"
        place = f"{row['stage']} {row['step']} {row.get('id', '')} {row.get('status', '')}"
        lines.append(f"sample    {place} reward {reward}: {row.get('response', '')}")
    lines += [f"warning   {text}" for text in view.warnings]
    return Text("\n".join(clip(line, width) for line in lines))


def draw_step(view: RunView, last: Row, activity: Activity, *, width: int, now_unix: float) -> list[str]:
    """Where the run is, and what its newest row says."""
    total, left = view.steps.get(last["stage"]), estimate_left_s(view)
    place = [
        f"{last['stage']} step {last['step']}{f' of {total}' if total else ''}",
        f"attempt {last['attempt']}",
    ]
    if "time_unix" in last:
        place.append(f"{format_duration(max(0.0, now_unix - last['time_unix']))} ago")
    if left is not None and activity.may_go_on:
        place.append(f"{format_duration(left)} left")
    lines = [", ".join(place)]
    for name in COURSES:
        held = [
            (step, row[name])
            for (stage, step), row in view.rows.items()
            if stage == last["stage"] and name in row
        ]
        if len(held) > 1:
            steps, values = (
                np.array([step for step, _ in held]),
                np.array([float(value) for _, value in held]),
            )
            room = max(10, min(60, width - len(name) - 30))
            course = draw_sparkline(steps, values, first=int(steps.min()), last=int(steps.max()), width=room)
            lines.append(f"{name} {format_number(values[0])} {course} {format_number(values[-1])}")
            break
    lines.append("   ".join(list_facts(last)))
    phases = {name.removeprefix("time/"): value for name, value in last.items() if name.startswith("time/")}
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    shown = [f"{name} {value:.2f} s" for name, value in ordered if name not in ("step", "weight_sync_pause")]
    lines += [f"phases    {'  '.join(shown)}"] if shown else []
    for name, (requests, tokens) in view.engines.items():
        lines.append(f"engine    {name}: {requests} requests, {tokens} tokens in step {view.engine_step[1]}")
    return lines


def clip(line: str, width: int) -> str:
    """The line as it can stand on a terminal: safe, and no wider than `width` columns."""
    shown = make_safe(line[: 2 * width], one_line=True)
    return shown if cell_len(shown) <= width else f"{set_cell_size(shown, width - 1)}…"


async def follow(
    root: Path,
    *,
    every_s: float,
    once: bool,
    find: Callable[[], Activity],
    show: Callable[[RunView, list[Row], Activity], None],
) -> None:
    """Calls `show` with the view, the new rows of metrics, and whether the run goes on, after each look with
    news.

    `find` tells whether the run is at work. Returns after a look that began when it was not, so that no row
    is missed. Raises RunDirError for a directory that is no run.
    """
    run_dir = open_run_dir(root)
    view = RunView(root, read_steps(run_dir))
    paths = (run_dir.metrics, run_dir.evaluations, run_dir.samples, run_dir.spans)
    metrics, evaluations, samples, spans = (FileCursor(path) for path in paths)
    shown: Activity | None = None
    while True:
        activity = find()
        fresh, evaluated, sampled, timed = (one.read_new() for one in (metrics, evaluations, samples, spans))
        for take, rows in ((view.take_metrics, fresh), (view.take_sample, sampled), (view.take_span, timed)):
            for row in rows:
                take(row)
        view.evaluation = evaluated[-1] if evaluated else view.evaluation
        if fresh or evaluated or sampled or timed or activity != shown:
            show(view, fresh, activity)
            shown = activity
        if once or not activity.may_go_on:
            return
        await trio.sleep(every_s)


async def follow_on_console(root: Path, console: Console, every_s: float, once: bool) -> None:
    """Follows a run on a terminal, or where there is none with one line for each step. Raises RunDirError."""
    run_dir = open_run_dir(root)

    def screen(view: RunView, activity: Activity) -> Text:
        return draw_screen(view, activity, width=console.width, now_unix=time.time())

    def print_lines(view: RunView, fresh: list[Row], activity: Activity) -> None:
        if once or not activity.may_go_on:
            console.print(screen(view, activity), soft_wrap=True)
            return
        for row in fresh[-PRINTED_ROWS:]:
            console.print(clip(describe_row(view, row), console.width), soft_wrap=True)

    if once or not console.is_terminal:
        await follow(root, every_s=every_s, once=once, find=lambda: find_activity(run_dir), show=print_lines)
        return
    with Live(console=console, auto_refresh=False) as live:
        await follow(
            root,
            every_s=every_s,
            once=once,
            find=lambda: find_activity(run_dir),
            show=lambda view, _, activity: live.update(screen(view, activity), refresh=True),
        )
