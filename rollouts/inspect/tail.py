"""The command `tail`: a run while it goes on, on one screen.

    files ──► FileCursor.read_new ──► RunView.take ──► draw_screen or describe_row (a line a step)

Rows are taken when they are whole. A long file is followed from its last START_BYTES on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
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
from rollouts.inspect.facts import TROUBLE, describe_failure, describe_step, find_failure, read_settings
from rollouts.inspect.record import open_run_dir
from rollouts.inspect.terminal import format_duration, format_number, make_safe
from rollouts.metrics.jsonl import Row, has_place, parse_row
from rollouts.run_dir import Activity, describe_activity, find_activity, list_parts

START_BYTES = 8 << 20  # of a file's end that is read at first
PACE_ROWS = 20  # rows whose times tell how long a step takes
PRINTED_ROWS = 20  # lines for one look: the first look finds the whole run
HELD_ROWS = 2000  # steps that the sparkline shows
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
            found = map(parse_row, lines.split(b"\n"))
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
    requests: list[Row] = field(default_factory=list)  # spans of the newest step that has any

    @property
    def last(self) -> Row:
        """The newest row of metrics, empty before any."""
        return next(reversed(self.rows.values()), {})

    def take(self, kind: str, row: Row) -> None:
        """Takes a row of a kind of file in."""
        place = f"{row['stage']} step {row['step']}"
        if kind == "metrics":
            self.take_step({k: of for k, of in row.items() if "/" not in k or type(of) in (int, float)})
            for name in TROUBLE.keys() & self.last.keys():
                if self.last[name]:
                    self.warnings.append(f"{place}: {self.last[name]:g} {TROUBLE[name]}")
        elif kind == "evaluations":
            self.evaluation = row
        elif kind == "samples":
            self.samples.append(row)
            if row.get("status") == "failed":
                self.warnings.append(f"{place}: {row.get('id', '')}: {describe_failure(find_failure(row))}")
        elif row.get("name") == "generate" and isinstance(row.get("tokens"), int):
            same = [
                old
                for old in self.requests[-1:]
                if (old["stage"], old["step"]) == (row["stage"], row["step"])
            ]
            self.requests = [*(self.requests if same else ()), row]

    def take_step(self, row: Row) -> None:
        """Takes a step in; an attempt that goes on from an earlier step replaces what came after it."""
        stage, step, attempt = (row[name] for name in ("stage", "step", "attempt"))
        again = [
            key
            for key, old in self.rows.items()
            if key >= (stage, step) and key[0] == stage and old["attempt"] < attempt
        ]
        for key in again:
            del self.rows[key]
        if again:
            self.warnings.append(f"{stage}: attempt {attempt} goes on from step {step}")
        self.rows[stage, step] = row
        if len(self.rows) > HELD_ROWS:
            del self.rows[next(iter(self.rows))]


def estimate_left_s(view: RunView) -> float | None:
    """Seconds that the rest of the stage takes at the pace of its last rows; None where that is not known."""
    last = view.last
    own = [row for row in view.rows.values() if all(row[name] == last[name] for name in ("stage", "attempt"))]
    times = [row["time_unix"] for row in own[-PACE_ROWS:] if "time_unix" in row]
    if len(times) < 2 or last["stage"] not in view.steps:
        return None
    return max(0.0, float(np.median(np.diff(times))) * (view.steps[last["stage"]] - last["step"]))


def describe_row(view: RunView, row: Row) -> str:
    """A row of metrics on one line."""
    total = view.steps.get(row["stage"])
    facts = "  ".join(map(" ".join, describe_step(row).items()))
    return f"{row['stage']} {row['step']}{f'/{total}' if total else ''}  {facts}"


def draw_screen(view: RunView, activity: Activity, *, width: int, now_unix: float) -> Text:
    """What is known of the run, at most about 25 lines of `width` characters."""
    lines = [f"{view.root}: {describe_activity(activity)}"]
    lines += (
        draw_step(view, activity, width=width, now_unix=now_unix) if view.rows else ["no step has ended yet"]
    )
    engines: dict[str, list[int]] = {}
    for row in view.requests:
        engines.setdefault(str(row.get("track")), []).append(row["tokens"])
    lines += [
        f"engine    {name}: {len(tokens)} requests, {sum(tokens)} tokens in step {view.requests[-1]['step']}"
        for name, tokens in engines.items()
    ]
    if view.evaluation is not None:
        values = [
            item
            for item in view.evaluation.items()
            if item[0].startswith("eval/") and isinstance(item[1], float)
        ]
        shown = ", ".join(f"{name} {format_number(value)}" for name, value in values[:4])
        lines.append(f"evaluated {view.evaluation['stage']} step {view.evaluation['step']}: {shown}")
    failures: Counter[str] = Counter()
    for row in view.rows.values():
        failures.update({name[5:]: value for name, value in row.items() if name.startswith("fail/")})
    if +failures:
        lines.append(
            f"failed    {', '.join(f'{kind} {count:.0f}' for kind, count in (+failures).most_common())}"
        )
    for row in view.samples:
        reward = f"{row['reward']:.3g}" if isinstance(row.get("reward"), int | float) else "none"
        place = f"{row['stage']} {row['step']} {row.get('id', '')} {row.get('status', '')}"
        lines.append(f"sample    {place} reward {reward}: {row.get('response', '')}")
    lines += [f"warning   {text}" for text in view.warnings]
    return Text("\n".join(clip(line, width) for line in lines))


def draw_step(view: RunView, activity: Activity, *, width: int, now_unix: float) -> list[str]:
    """Where the run is, and what its newest row says."""
    last, left = view.last, estimate_left_s(view)
    total = view.steps.get(last["stage"])
    place = f"{last['stage']} step {last['step']}{f' of {total}' if total else ''}, attempt {last['attempt']}"
    if "time_unix" in last:
        place += f", {format_duration(max(0.0, now_unix - last['time_unix']))} ago"
    if left is not None and activity.may_go_on:
        place += f", {format_duration(left)} left"
    lines = [place]
    own = [row for row in view.rows.values() if row["stage"] == last["stage"]]
    for name in COURSES:
        held = [(row["step"], float(row[name])) for row in own if name in row]
        if len(held) > 1:
            steps, values = (np.array(column) for column in zip(*held, strict=True))
            room = max(10, min(60, width - len(name) - 30))
            course = draw_sparkline(steps, values, first=steps.min(), last=steps.max(), width=room)
            lines.append(f"{name} {format_number(values[0])} {course} {format_number(values[-1])}")
            break
    lines.append("   ".join(map(" ".join, describe_step(last).items())))
    phases = {name[5:]: last[name] for name in last if name.startswith("time/")}
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    shown = [f"{name} {value:.2f} s" for name, value in ordered if name not in ("step", "weight_sync_pause")]
    return [*lines, f"phases    {'  '.join(shown)}"] if shown else lines


def clip(line: str, width: int) -> str:
    """The line as it can stand on a terminal: safe, and no wider than `width` columns."""
    shown = make_safe(line[: 2 * width], one_line=True)
    return shown if cell_len(shown) <= width else f"{set_cell_size(shown, width - 1)}…"


async def follow(root: Path, console: Console, every_s: float, once: bool) -> None:
    """Follows a run on a terminal, or where there is none with one line for each step.

    Ends after a look that began when the run was not at work, so that no row is missed. Raises RunDirError
    for a directory that is no run.
    """
    run_dir = open_run_dir(root)
    settings = read_settings(run_dir)
    asked = {name.removesuffix(".steps"): text for name, text in settings.items() if name.endswith(".steps")}
    view = RunView(root, {stage: int(text) for stage, text in asked.items() if text.isdecimal()})
    cursors = {path.stem: FileCursor(path) for path in run_dir.row_files if path != run_dir.contributions}
    shown: Activity | None = None
    lively = console.is_terminal and not once
    with Live(console=console, auto_refresh=False) if lively else nullcontext() as live:
        while True:
            activity = find_activity(run_dir)
            found = {kind: cursor.read_new() for kind, cursor in cursors.items()}
            for kind, rows in found.items():
                for row in rows:
                    view.take(kind, row)
            if any(found.values()) or activity != shown:
                shown = activity
                screen = draw_screen(view, activity, width=console.width, now_unix=time.time())
                if live is not None:
                    live.update(screen, refresh=True)
                elif once or not activity.may_go_on:
                    console.print(screen, soft_wrap=True)
                else:
                    for row in found["metrics"][-PRINTED_ROWS:]:
                        console.print(clip(describe_row(view, row), console.width), soft_wrap=True)
            if once or not activity.may_go_on:
                return
            await trio.sleep(every_s)
