"""The command `tail`: a run while it goes on, on one screen.

    files ──► FileCursor.read_new ──► RunView.take ──► draw_screen or describe_row (a line a step)

Rows are taken when they are whole. A long file is followed from its last START_BYTES on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import trio
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollouts.inspect.chart import draw_sparkline
from rollouts.inspect.facts import (
    FAILED,
    NOT_PHASES,
    TROUBLE,
    describe_failure,
    find_failure,
    format_duration,
    read_settings,
)
from rollouts.inspect.record import open_run_dir
from rollouts.inspect.terminal import format_number, make_safe
from rollouts.metrics.jsonl import Row, has_place, parse_row
from rollouts.run_dir import Activity, describe_activity, find_activity, list_parts

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
COURSES = ("reward/mean", "rewards/accuracies", "loss/total")  # the first that a stage has is drawn


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
                lines, newline, _ = file.read().rpartition(b"\n")
            self.offset += len(lines) + len(newline)
            found = (parse_row(line) for line in lines.split(b"\n"))
            rows += [row for row in found if row and has_place(row) and isinstance(row.get("stage"), str)]
        return rows


@dataclass(slots=True)
class RunView:
    """What the rows so far say."""

    root: Path
    steps: dict[str, int] = field(default_factory=dict)  # that the config asks for, by stage
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)  # by stage and step, of the newest attempt
    evaluation: Row | None = None
    samples: deque[Row] = field(default_factory=lambda: deque(maxlen=5))
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    failures: dict[str, float] = field(default_factory=dict)  # of the rows that were read, by class
    engines: dict[str, list[int]] = field(default_factory=dict)  # tokens of each request of the newest step
    engine_step: tuple[str, int] = ("", 0)

    @property
    def last(self) -> Row | None:
        """The newest row of metrics."""
        return next(reversed(self.rows.values()), None)

    def take(self, kind: str, row: Row) -> None:
        """Takes a row of a kind of file in."""
        place = f"{row['stage']} step {row['step']}"
        if kind == "metrics":
            self.take_metrics(row, place)
        elif kind == "evaluations":
            self.evaluation = row
        elif kind == "samples":
            self.samples.append(row)
            if row.get("status") == "failed":
                self.warnings.append(f"{place}: {row.get('id', '')}: {describe_failure(find_failure(row))}")
        elif row.get("name") == "generate" and isinstance(row.get("tokens"), int):
            if self.engine_step != (row["stage"], row["step"]):
                self.engine_step, self.engines = (row["stage"], row["step"]), {}
            self.engines.setdefault(str(row.get("track")), []).append(row["tokens"])

    def take_metrics(self, row: Row, place: str) -> None:
        """Takes a step in; an attempt that goes on from an earlier step replaces what came after it."""
        row = {name: value for name, value in row.items() if "/" not in name or type(value) in (int, float)}
        again = [
            key
            for key, old in self.rows.items()
            if key[0] == row["stage"] and key[1] >= row["step"] and old["attempt"] < row["attempt"]
        ]
        for key in again:
            del self.rows[key]
        if again:
            self.warnings.append(f"{row['stage']}: attempt {row['attempt']} goes on from step {row['step']}")
        self.rows[row["stage"], row["step"]] = row
        if len(self.rows) > HELD_ROWS:
            del self.rows[next(iter(self.rows))]
        for name, value in row.items():
            if name.startswith(FAILED) and value:
                kind = name.removeprefix(FAILED)
                self.failures[kind] = self.failures.get(kind, 0.0) + value
            if name in TROUBLE and value:
                self.warnings.append(f"{place}: {value:g} {TROUBLE[name]}")


def estimate_left_s(view: RunView) -> float | None:
    """Seconds that the rest of the stage takes at the pace of its last rows; None where that is not known."""
    last = view.last or {}
    own = [row for row in view.rows.values() if all(row[name] == last[name] for name in ("stage", "attempt"))]
    times = [row["time_unix"] for row in own[-PACE_ROWS:] if "time_unix" in row]
    if len(times) < 2 or last["stage"] not in view.steps:
        return None
    return max(0.0, float(np.median(np.diff(times))) * (view.steps[last["stage"]] - last["step"]))


def describe_row(view: RunView, row: Row) -> str:
    """A row of metrics on one line."""
    total = view.steps.get(row["stage"])
    return f"{row['stage']} {row['step']}{f'/{total}' if total else ''}  {'  '.join(list_facts(row))}"


def list_facts(row: Row) -> list[str]:
    """`reward 0.5`, …: the main numbers that a step has."""
    return [f"{heading} {format_number(row[name])}" for heading, name in FACTS.items() if name in row]


def draw_screen(view: RunView, activity: Activity, *, width: int, now_unix: float) -> Text:
    """What is known of the run, at most about 25 lines of `width` characters."""
    lines = [f"{view.root}: {describe_activity(activity)}"]
    if view.last is None:
        lines.append("no step has ended yet")
    else:
        lines += draw_step(view, view.last, activity, width=width, now_unix=now_unix)
    if view.evaluation is not None:
        shown = [
            f"{name} {format_number(value)}"
            for name, value in view.evaluation.items()
            if name.startswith("eval/") and isinstance(value, float)
        ]
        place = f"{view.evaluation['stage']} step {view.evaluation['step']}"
        lines.append(f"evaluated {place}: {', '.join(shown[:4])}")
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
    place = f"{last['stage']} step {last['step']}{f' of {total}' if total else ''}, attempt {last['attempt']}"
    if "time_unix" in last:
        place += f", {format_duration(max(0.0, now_unix - last['time_unix']))} ago"
    if left is not None and activity.may_go_on:
        place += f", {format_duration(left)} left"
    lines = [place]
    for name in COURSES:
        held = {key: row[name] for key, row in view.rows.items() if key[0] == last["stage"] and name in row}
        if len(held) > 1:
            steps, values = np.array([step for _, step in held]), np.array(list(held.values()), np.float64)
            room = max(10, min(60, width - len(name) - 30))
            course = draw_sparkline(steps, values, first=int(steps.min()), last=int(steps.max()), width=room)
            lines.append(f"{name} {format_number(values[0])} {course} {format_number(values[-1])}")
            break
    lines.append("   ".join(list_facts(last)))
    phases = {name.removeprefix("time/"): value for name, value in last.items() if name.startswith("time/")}
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    shown = [f"{name} {value:.2f} s" for name, value in ordered if name not in NOT_PHASES]
    lines += [f"phases    {'  '.join(shown)}"] if shown else []
    for name, tokens in view.engines.items():
        step = view.engine_step[1]
        lines.append(f"engine    {name}: {len(tokens)} requests, {sum(tokens)} tokens in step {step}")
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
    settings = read_settings(run_dir)
    asked = {name.removesuffix(".steps"): text for name, text in settings.items() if name.endswith(".steps")}
    view = RunView(root, {stage: int(text) for stage, text in asked.items() if text.isdecimal()})
    cursors = {path.stem: FileCursor(path) for path in run_dir.row_files if path != run_dir.contributions}
    shown: Activity | None = None
    while True:
        activity = find()
        found = {kind: cursor.read_new() for kind, cursor in cursors.items()}
        for kind, rows in found.items():
            for row in rows:
                view.take(kind, row)
        if any(found.values()) or activity != shown:
            show(view, found["metrics"], activity)
            shown = activity
        if once or not activity.may_go_on:
            return
        await trio.sleep(every_s)


async def follow_on_console(root: Path, console: Console, every_s: float, once: bool) -> None:
    """Follows a run on a terminal, or where there is none with one line for each step. Raises RunDirError."""
    run_dir = open_run_dir(root)

    with (
        Live(console=console, auto_refresh=False)
        if console.is_terminal and not once
        else nullcontext() as live
    ):

        def show(view: RunView, fresh: list[Row], activity: Activity) -> None:
            screen = draw_screen(view, activity, width=console.width, now_unix=time.time())
            if live is not None:
                live.update(screen, refresh=True)
            elif once or not activity.may_go_on:
                console.print(screen, soft_wrap=True)
            else:
                for row in fresh[-PRINTED_ROWS:]:
                    console.print(clip(describe_row(view, row), console.width), soft_wrap=True)

        await follow(root, every_s=every_s, once=once, find=lambda: find_activity(run_dir), show=show)
