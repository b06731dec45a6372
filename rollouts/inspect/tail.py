"""A run while it goes on: the files are followed row by row, and what they say fits on one screen.

    files ──► FileCursor.read_new ──► RunView.take ──► draw_screen (a terminal) or describe_row (one line a step, anywhere else)

Rows are taken when they are whole. A long file is followed from its last START_BYTES on.
"""

from __future__ import annotations

import io
import statistics
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import trio
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollouts.inspect.outcomes import OTHER_TROUBLE, describe_failure
from rollouts.inspect.read import keep_numbers, open_run_dir
from rollouts.inspect.sparklines import draw_sparkline, format_number
from rollouts.inspect.terminal import make_safe
from rollouts.metrics.jsonl import Row, has_place, parse_row
from rollouts.run_dir import Activity, RunDir, describe_activity, find_activity, list_parts, parse_part

START_BYTES = 8 << 20  # of a file's end that is read at first
PACE_ROWS = 20  # rows whose times tell how long a step takes
PRINTED_ROWS = 20  # lines for one look, the last ones: the first look finds the whole run
HELD_ROWS = 2000  # steps that the sparkline shows
HELD_SAMPLES, HELD_WARNINGS = 5, 4
FACTS = (  # heading, metric
    ("reward", "reward/mean"), ("loss", "loss/total"), ("grad norm", "optim/grad_norm"), ("length", "response_length/mean"),
    ("cut", "truncated/frac"), ("lag", "off_policy/max"), ("tok/s", "perf/generated_tokens_per_s"), ("s/step", "time/step"),
)  # fmt: skip
COURSES = (
    "reward/mean",
    "rewards/accuracies",
    "loss/total",
)  # the sparkline is of the first that a stage has


@dataclass(slots=True)
class FileCursor:
    """How far one .jsonl file was read."""

    path: Path  # of part 0
    part: int = -1  # -1: not begun
    offset: int = 0  # bytes of that part, always the beginning of a line

    def read_new(self) -> list[Row]:
        """The rows of the lines that were ended since, over parts that were begun since. What is no row is
        passed over; doctor tells of it.
        """
        parts = list_parts(self.path)
        if self.part < 0 and parts:
            first = parts[-2] if len(parts) > 1 and parts[-1].stat().st_size < START_BYTES else parts[-1]
            self.part, self.offset = parse_part(self.path, first.name) or 0, find_start(first)
        rows: list[Row] = []
        for part in parts:
            number = parse_part(self.path, part.name) or 0
            if number < self.part:
                continue
            if number > self.part:
                self.part, self.offset = number, 0
            rows += self._read_part(part)
        return rows

    def _read_part(self, part: Path) -> list[Row]:
        with part.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self.offset += end
        found = (parse_row(line) for line in data[:end].split(b"\n") if line)
        return [
            keep_numbers(row)
            for row in found
            if row is not None and has_place(row) and isinstance(row.get("stage"), str)
        ]


def find_start(part: Path) -> int:
    """Where the first line begins of the last START_BYTES of a file."""
    with part.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        if size <= START_BYTES:
            return 0
        file.seek(size - START_BYTES)
        file.readline()
        return file.tell()


@dataclass(slots=True)
class RunView:
    """What the rows so far say."""

    root: Path
    steps: dict[str, int] = field(default_factory=dict)  # of the config, by stage
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)  # by stage and step, of the newest attempt
    attempts: dict[str, int] = field(default_factory=dict)  # the newest one that wrote a row, by stage
    evaluation: Row | None = None
    samples: deque[Row] = field(default_factory=lambda: deque(maxlen=HELD_SAMPLES))
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=HELD_WARNINGS))
    failures: dict[str, float] = field(default_factory=dict)  # of the rows that were read, by class
    engines: dict[str, list[float]] = field(
        default_factory=dict
    )  # by name: spans, tokens and when the last one ended, of the newest step
    engine_step: tuple[str, int] = ("", 0)

    def take(self, name: str, rows: Iterable[Row]) -> list[Row]:
        """Takes rows of a file in; of metrics those that are new, for who prints a line each."""
        kept = list(rows)
        for row in kept:
            if name == "metrics":
                self._take_metrics(row)
            elif name == "evaluations":
                self.evaluation = row
            elif name == "samples":
                self._take_sample(row)
            elif name == "spans":
                self._take_span(row)
        return kept if name == "metrics" else []

    def _take_metrics(self, row: Row) -> None:
        stage, step = row["stage"], row["step"]
        again: list[tuple[str, int]] = []
        if row["attempt"] > self.attempts.get(stage, 0):
            self.attempts[stage] = row["attempt"]
            again = [key for key in self.rows if key[0] == stage and key[1] >= step]
        for key in again:
            del self.rows[key]
        self.rows[stage, step] = row
        while len(self.rows) > HELD_ROWS:
            del self.rows[next(iter(self.rows))]
        for metric, value in row.items():
            if metric.startswith("fail/") and value:
                self.failures[metric[5:]] = self.failures.get(metric[5:], 0.0) + value
        for metric, what in OTHER_TROUBLE:
            if row.get(metric):
                self.warnings.append(f"{stage} step {step}: {row[metric]:g} {what}")
        if again:
            self.warnings.append(f"{stage}: attempt {row['attempt']} goes on from step {step}")

    def _take_sample(self, row: Row) -> None:
        self.samples.append(row)
        if row.get("status") == "failed":
            self.warnings.append(
                f"{row['stage']} step {row['step']}: {row.get('id', '')}: {describe_failure(row)}"
            )

    def _take_span(self, row: Row) -> None:
        if row.get("name") != "generate" or not row.keys() >= {"start_unix", "duration_s", "tokens"}:
            return
        if self.engine_step != (row["stage"], row["step"]):
            self.engine_step, self.engines = (row["stage"], row["step"]), {}
        held = self.engines.setdefault(str(row.get("track", "")), [0.0, 0.0, 0.0])
        held[0] += 1
        held[1] += row["tokens"]
        held[2] = max(held[2], row["start_unix"] + row["duration_s"])

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
    return {
        name: table["steps"]
        for name, table in settings.items()
        if isinstance(table, dict) and isinstance(table.get("steps"), int)
    }


def estimate_left_s(view: RunView) -> float | None:
    """Seconds that the rest of the stage takes at the pace of its last rows; None where that is not known."""
    last = view.last
    if last is None or last["stage"] not in view.steps:
        return None
    rows = [
        row
        for (stage, _), row in view.rows.items()
        if stage == last["stage"] and row["attempt"] == last["attempt"]
    ]
    times = [row["time_unix"] for row in rows[-PACE_ROWS:] if "time_unix" in row]
    if len(times) < 2:
        return None
    pace = statistics.median(after - before for before, after in pairwise(times))
    return max(0.0, pace * (view.steps[last["stage"]] - last["step"]))


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def describe_row(view: RunView, row: Row) -> str:
    """A row of metrics on one line."""
    total = view.steps.get(row["stage"])
    facts = [f"{heading} {format_number(row[metric])}" for heading, metric in FACTS if metric in row]
    return "  ".join([f"{row['stage']} {row['step']}{f'/{total}' if total else ''}", *facts])


def draw_screen(view: RunView, activity: Activity, *, width: int, now_unix: float) -> Text:
    """What is known of the run, at most about 25 lines of `width` characters."""
    last = view.last
    lines = [f"{view.root}: {describe_activity(activity)}"]
    lines += (
        ["no step has ended yet"]
        if last is None
        else draw_step(view, last, activity, width=width, now_unix=now_unix)
    )
    if view.evaluation is not None:
        shown = [
            f"{name} {format_number(value)}"
            for name, value in view.evaluation.items()
            if name.startswith("eval/") and isinstance(value, float)
        ]
        lines.append(
            f"evaluated {view.evaluation['stage']} step {view.evaluation['step']}: {', '.join(shown[:4])}"
        )
    if view.failures:
        lines.append(
            "failed    "
            + ", ".join(
                f"{kind} {count:.0f}"
                for kind, count in sorted(view.failures.items(), key=lambda item: -item[1])
            )
        )
    lines += [f"sample    {describe_sample(row)}" for row in view.samples]
    lines += [f"warning   {text}" for text in view.warnings]
    return Text("\n".join(clip(line, width) for line in lines))


def draw_step(view: RunView, last: Row, activity: Activity, *, width: int, now_unix: float) -> list[str]:
    """Where the run is, and what its newest row says."""
    total, left = view.steps.get(last["stage"]), estimate_left_s(view)
    place = f"{last['stage']} step {last['step']}{f' of {total}' if total else ''}, attempt {last['attempt']}"
    ago = [f"{format_duration(max(0.0, now_unix - last['time_unix']))} ago"] if "time_unix" in last else []
    lines = [
        ", ".join(
            [
                place,
                *ago,
                *([f"{format_duration(left)} left"] if left is not None and activity.may_go_on else []),
            ]
        )
    ]
    lines += draw_course(view, last["stage"], width)
    facts = [f"{heading} {format_number(last[metric])}" for heading, metric in FACTS if metric in last]
    lines.append("   ".join(facts))
    phases = {
        name[5:]: value
        for name, value in last.items()
        if name.startswith("time/") and name not in ("time/step", "time/weight_sync_pause")
    }
    if phases:
        lines.append(
            "phases    "
            + "  ".join(
                f"{name} {value:.2f} s" for name, value in sorted(phases.items(), key=lambda item: -item[1])
            )
        )
    engines = view.engines.items()
    return [
        *lines,
        *(
            f"engine    {name}: {held[0]:.0f} requests, {held[1]:.0f} tokens in step {view.engine_step[1]}"
            for name, held in engines
        ),
    ]


def draw_course(view: RunView, stage: str, width: int) -> list[str]:
    """A sparkline of the first of COURSES that the stage has."""
    for name in COURSES:
        held = [(step, row[name]) for (one, step), row in view.rows.items() if one == stage and name in row]
        if len(held) > 1:
            steps, values = (
                np.array([step for step, _ in held]),
                np.array([value for _, value in held], dtype=float),
            )
            first, last = int(steps.min()), int(steps.max())
            text = draw_sparkline(
                steps, values, first=first, last=last, width=max(10, min(60, width - len(name) - 30))
            )
            return [f"{name} {format_number(values[0])} {text} {format_number(values[-1])}"]
    return []


def describe_sample(row: Row) -> str:
    """A sample on one line: what identifies it, and the end of its response."""
    reward = f"{row['reward']:.3g}" if isinstance(row.get("reward"), int | float) else "none"
    return (
        f"{row['stage']} {row['step']} {row.get('id', '')} {row.get('status', '')} reward {reward}:"
        f" {row.get('response', '')}"
    )


def clip(line: str, width: int) -> str:
    """The line as it can stand on a terminal: what would steer it is written out, and it ends at the border,
    where letters take two columns too.
    """
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
    """Calls `show` with the view, the rows of metrics that are new, and whether the run goes on: at first,
    and after each look that found a change.

    `find` tells whether the run is at work. Returns after a look that began when it was not, so that no row
    is missed, and goes on where that cannot be known. Raises RunDirError for a directory that is no run.
    """
    run_dir = open_run_dir(root)
    view = RunView(root, read_steps(run_dir))
    cursors = {
        path.stem: FileCursor(path)
        for path in (run_dir.metrics, run_dir.evaluations, run_dir.samples, run_dir.spans)
    }
    shown: Activity | None = None
    while True:
        activity = find()
        new = {name: cursor.read_new() for name, cursor in cursors.items()}
        fresh = [row for name, rows in new.items() for row in view.take(name, rows)]
        if any(new.values()) or activity != shown:
            show(view, fresh, activity)
            shown = activity
        if once or not activity.may_go_on:
            return
        await trio.sleep(every_s)


async def follow_on_console(root: Path, console: Console, every_s: float, once: bool) -> None:
    """Follows a run on a terminal: a screen that is drawn again, or where there is no terminal one line for
    each step. Raises RunDirError.
    """
    run_dir = open_run_dir(root)

    def find() -> Activity:
        return find_activity(run_dir)

    def screen(view: RunView, activity: Activity) -> Text:
        return draw_screen(view, activity, width=console.width, now_unix=time.time())

    if once or not console.is_terminal:

        def show_lines(view: RunView, fresh: list[Row], activity: Activity) -> None:
            if once or not activity.may_go_on:
                console.print(screen(view, activity), soft_wrap=True)
            else:
                console.print(
                    "\n".join(clip(describe_row(view, row), console.width) for row in fresh[-PRINTED_ROWS:]),
                    soft_wrap=True,
                )

        await follow(root, every_s=every_s, once=once, find=find, show=show_lines)
        return
    with Live(console=console, auto_refresh=False) as live:
        await follow(
            root,
            every_s=every_s,
            once=once,
            find=find,
            show=lambda view, _, activity: live.update(screen(view, activity), refresh=True),
        )
