"""The command `tail`: a run while it goes on, on one screen.

    files ──► FileCursor.read_new ──► the newest rows of each kind ──► draw_screen, or a line a step

Rows are taken when they are whole. A long file is followed from its last START_BYTES on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import numpy as np
import trio
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollouts.inspect.chart import compute_means, draw_sparkline
from rollouts.inspect.facts import TROUBLE, describe_failure, describe_step, find_failure, read_settings
from rollouts.inspect.record import open_run_dir
from rollouts.inspect.terminal import format_duration, format_number, make_safe
from rollouts.metrics.jsonl import Row, has_place, parse_row
from rollouts.run_dir import Activity, describe_activity, find_activity, list_parts

START_BYTES = 8 << 20  # of the end of each of the last two parts that is read at first
PACE_ROWS = 20  # rows whose times tell how long a step takes
PRINTED_ROWS = 20  # lines for one look: the first look finds the whole run
HELD_ROWS = {"metrics": 2000, "evaluations": 1, "samples": 5, "spans": 20_000}  # the newest of each kind
SHOWN_WARNINGS = 4
COURSES = ("reward/mean", "rewards/accuracies", "loss/total")  # the first that a stage has is drawn
NOT_PHASES = ("time/step", "time/weight_sync_pause")  # the whole, and a part of another phase


@dataclass(slots=True)
class FileCursor:
    """How far one .jsonl file was read."""

    path: Path  # of the first part
    part: Path | None = None  # the one that is read
    offset: int = 0  # bytes of that part, always the beginning of a line but at first

    def read_new(self) -> list[Row]:
        """The rows of the lines that were ended since, over parts that were begun since. Damaged ones are
        left out.
        """
        rows: list[Row] = []
        parts, first = list_parts(self.path), self.part is None
        for part in parts[-2:] if first else list(dropwhile(lambda part: part != self.part, parts)):
            if part != self.part:
                self.part, self.offset = part, max(0, part.stat().st_size - START_BYTES) if first else 0
            with part.open("rb") as file:
                file.seek(self.offset)
                lines, newline, _ = file.read().rpartition(b"\n")
            self.offset += len(lines) + len(newline)
            found = map(parse_row, lines.split(b"\n"))
            rows += [row for row in found if row and has_place(row) and isinstance(row.get("stage"), str)]
        return rows


def find_steps(rows: Iterable[Row]) -> tuple[list[Row], list[str]]:
    """The rows of metrics, without those after the step from which a later attempt went on; and warnings."""
    steps: list[Row] = []
    warnings: list[str] = []
    for row in rows:
        stage, step, attempt, held = row["stage"], row["step"], row["attempt"], len(steps)
        while (
            steps
            and steps[-1]["stage"] == stage
            and steps[-1]["step"] >= step
            and steps[-1]["attempt"] < attempt
        ):
            steps.pop()
        if len(steps) < held:
            warnings.append(f"{stage}: attempt {attempt} goes on from step {step}")
        steps.append({name: of for name, of in row.items() if "/" not in name or type(of) in (int, float)})
        known = {TROUBLE[name]: count for name in TROUBLE if (count := steps[-1].get(name))}
        warnings += [f"{stage} step {step}: {count:g} {what}" for what, count in known.items()]
    return steps, warnings


def estimate_left_s(steps: Sequence[Row], asked: Mapping[str, int]) -> float | None:
    """Seconds that the rest of the stage takes at the pace of its last rows; None where that is not known."""
    last = steps[-1]
    own = [row for row in steps if all(row[name] == last[name] for name in ("stage", "attempt"))]
    times = [row["time_unix"] for row in own[-PACE_ROWS:] if "time_unix" in row]
    if len(times) < 2 or last["stage"] not in asked:
        return None
    return max(0.0, float(np.median(np.diff(times))) * (asked[last["stage"]] - last["step"]))


def describe_place(row: Row, asked: Mapping[str, int]) -> str:
    """Stage and step of a row, and how many steps the config asks for."""
    total = f" of {asked[row['stage']]}" if row["stage"] in asked else ""
    return f"{row['stage']} step {row['step']}{total}"


def draw_screen(
    root: Path,
    history: Mapping[str, Iterable[Row]],
    asked: Mapping[str, int],
    activity: Activity,
    *,
    width: int,
    now_unix: float,
) -> Text:
    """What is known of the run, at most about 25 lines of `width` characters. `asked`: steps by stage."""
    steps, warnings = find_steps(history["metrics"])
    lines = [f"{root}: {describe_activity(activity)}"]
    lines += (
        draw_step(steps, asked, activity, width=width, now_unix=now_unix)
        if steps
        else ["no step has ended yet"]
    )
    requests = [
        row for row in history["spans"] if row.get("name") == "generate" and type(row.get("tokens")) is int
    ]
    tokens: dict[str, list[int]] = {}
    for row in requests:
        if all(row[name] == requests[-1][name] for name in ("stage", "step")):
            tokens.setdefault(str(row.get("track")), []).append(row["tokens"])
    for name, counts in tokens.items():
        step = requests[-1]["step"]
        lines.append(f"engine    {name}: {len(counts)} requests, {sum(counts)} tokens in step {step}")
    for row in history["evaluations"]:
        values = [
            f"{name} {format_number(of)}" for name, of in row.items() if "/" in name and isinstance(of, float)
        ]
        lines.append(f"evaluated {row['stage']} step {row['step']}: {', '.join(values[:4])}")
    failed: Counter[str] = Counter()
    for row in steps:
        failed.update({name[5:]: row[name] for name in row if name.startswith("fail/") and row[name]})
    if failed:
        lines.append(f"failed    {', '.join(f'{kind} {count:.0f}' for kind, count in failed.most_common())}")
    for row in history["samples"]:
        reward = f"{row['reward']:.3g}" if isinstance(row.get("reward"), int | float) else "none"
        place = f"{row['stage']} {row['step']} {row.get('id', '')} {row.get('status', '')}"
        lines.append(f"sample    {place} reward {reward}: {row.get('response', '')}")
        if row.get("status") == "failed":
            why = describe_failure(find_failure(row))
            warnings.append(f"{row['stage']} step {row['step']}: {row.get('id', '')}: {why}")
    lines += [f"warning   {text}" for text in warnings[-SHOWN_WARNINGS:]]
    return Text("\n".join(clip(line, width) for line in lines))


def draw_step(
    rows: Sequence[Row], asked: Mapping[str, int], activity: Activity, *, width: int, now_unix: float
) -> list[str]:
    """Where the run is, and what its newest row says."""
    last, left = rows[-1], estimate_left_s(rows, asked)
    place = f"{describe_place(last, asked)}, attempt {last['attempt']}"
    if "time_unix" in last:
        place += f", {format_duration(max(0.0, now_unix - last['time_unix']))} ago"
    if left is not None and activity.may_go_on:
        place += f", {format_duration(left)} left"
    lines = [place]
    own = [row for row in rows if row["stage"] == last["stage"]]
    held = {name: [row for row in own if name in row] for name in COURSES}
    for name in [name for name in COURSES if len(held[name]) > 1][:1]:
        steps, values = (np.array([row[key] for row in held[name]]) for key in ("step", name))
        span = int(steps.max() - steps.min()) + 1
        count = min(max(10, min(60, width - len(name) - 30)), span)
        course = draw_sparkline(compute_means((steps - steps.min()) * count // span, values, count))
        lines.append(f"{name} {format_number(values[0])} {course} {format_number(values[-1])}")
    lines.append("   ".join(map(" ".join, describe_step(last).items())))
    phases = [(of, name) for name, of in last.items() if name.startswith("time/") and name not in NOT_PHASES]
    shown = "  ".join(f"{name[5:]} {seconds:.2f} s" for seconds, name in sorted(phases, reverse=True))
    return [*lines, f"phases    {shown}"] if shown else lines


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
    asked = {
        name[:-6]: int(text)
        for name, text in settings.items()
        if name.endswith(".steps") and text.isdecimal()
    }
    history = {kind: deque[Row](maxlen=count) for kind, count in HELD_ROWS.items()}
    cursors = {kind: FileCursor(root / f"{kind}.jsonl") for kind in history}
    shown: Activity | None = None
    lively = console.is_terminal and not once
    with Live(console=console, auto_refresh=False) if lively else nullcontext() as live:
        while True:
            activity = find_activity(run_dir)
            found = {kind: cursor.read_new() for kind, cursor in cursors.items()}
            for kind, rows in found.items():
                history[kind].extend(rows)
            if any(found.values()) or activity != shown:
                shown = activity
                screen = draw_screen(
                    root, history, asked, activity, width=console.width, now_unix=time.time()
                )
                if live is not None:
                    live.update(screen, refresh=True)
                elif once or not activity.may_go_on:
                    console.print(screen, soft_wrap=True)
                else:
                    for row in found["metrics"][-PRINTED_ROWS:]:
                        facts = [describe_place(row, asked), *map(" ".join, describe_step(row).items())]
                        console.print(clip("  ".join(facts), console.width), soft_wrap=True)
            if once or not activity.may_go_on:
                return
            await trio.sleep(every_s)
