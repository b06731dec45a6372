"""Findings about a run that was made, or is at work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rollouts.checkpoints.manifest import compute_sha256, read_manifest
from rollouts.errors import CheckpointError, RunDirError
from rollouts.inspect.tail import format_duration
from rollouts.metrics.jsonl import parse_row
from rollouts.preflight.findings import Finding
from rollouts.run_dir import (
    Activity,
    RunDir,
    check_links,
    describe_activity,
    find_activity,
    list_parts,
    parse_step,
    read_holder,
)
from rollouts.trackers.launch import describe_catching_up
from rollouts.trackers.position import count_unsent, describe_left_out, position_path, read_position
from rollouts.trackers.sinks import SINKS

SHOWN = 5  # damaged lines that are named


def examine_run(run_dir: RunDir, *, deep: bool) -> list[Finding]:
    """All findings about a run. `deep`: every byte of its checkpoints is read."""
    try:
        check_links(run_dir)
    except RunDirError as error:
        return [Finding("error", "run", str(error))]
    activity = find_activity(run_dir)
    running = activity.may_go_on
    findings = [describe_life(run_dir, activity)]
    skipped = 0.0
    for path in run_dir.row_files:
        parts = list_parts(path)
        if parts:
            finding, count = examine_rows(parts, running=running)
            findings.append(finding)
            skipped += count
    if skipped:
        text = (
            f"{skipped:g} optimizer steps changed nothing, for loss or gradient was not finite; lower the"
            " learning rate, or clip the gradient"
        )
        findings.append(Finding("warning", "skipped steps", text))
    return [*findings, *examine_checkpoints(run_dir, deep=deep), *examine_trackers(run_dir, running=running)]


def describe_life(run_dir: RunDir, activity: Activity) -> Finding:
    """Whether the run is at work, finished, neither, or all that is known where that cannot be told."""
    if activity.locked:
        holder = read_holder(run_dir)
        return Finding(
            "ok",
            "run",
            f"{run_dir.root} is at work: process {holder.get('pid', '?')} on {holder.get('host', '?')}",
        )
    if not activity.certain:
        text = (
            f"{run_dir.root} is {describe_activity(activity)}; {describe_last_row(run_dir)}; if nobody is at"
            " work there, go on with --resume"
        )
        return Finding("warning", "run", text)
    if activity.finished:
        return Finding("ok", "run", f"{run_dir.root} is finished")
    return Finding(
        "warning",
        "run",
        f"{run_dir.root} is neither at work nor finished: it was stopped or has died; go on with --resume",
    )


def describe_last_row(run_dir: RunDir) -> str:
    """How long ago the newest row was written, by the times of the files."""
    times = [part.stat().st_mtime for path in run_dir.row_files for part in list_parts(path)]
    return (
        f"last row {format_duration(max(0.0, time.time() - max(times)))} ago"
        if times
        else "it has no row yet"
    )


def examine_rows(parts: list[Path], *, running: bool) -> tuple[Finding, float]:
    """Whether every line of a file is a row, and the skipped optimizer steps that its rows count (of all
    attempts).
    """
    rows, skipped, damaged = 0, 0.0, list[str]()
    torn = 0
    for part in parts:
        with part.open("rb") as file:
            for number, line in enumerate(file, 1):
                row = parse_row(line)
                if row is not None:
                    rows += 1
                    skipped += row.get("optim/skipped_steps", 0.0)
                elif part == parts[-1] and not line.endswith(b"\n"):
                    torn = len(line)
                else:
                    damaged.append(f"{part.name}:{number}")
    subject = parts[0].name
    if damaged:
        named = ", ".join(damaged[:SHOWN]) + (
            f" and {len(damaged) - SHOWN} more" if len(damaged) > SHOWN else ""
        )
        return (
            Finding("error", subject, f"{named}: not a JSON object; restore the file, or delete these lines"),
            skipped,
        )
    if torn and not running:
        return (
            Finding(
                "warning",
                subject,
                f"{rows} rows; the last line is torn ({torn} bytes): its writer was killed; --resume"
                " repairs it",
            ),
            skipped,
        )
    return Finding("ok", subject, f"{rows} rows"), skipped


def examine_checkpoints(run_dir: RunDir, *, deep: bool) -> Iterator[Finding]:
    """Whether each checkpoint holds what its manifest says."""
    paths = [path for path in sorted(run_dir.checkpoints.glob("*/*")) if path.is_dir()]
    steps = [path for path in paths if parse_step(path.name) is not None]
    bad = [(path, reason) for path in steps if (reason := find_damage(path, deep=deep))]
    for path, reason in bad:
        yield Finding(
            "error",
            str(path.relative_to(run_dir.root)),
            f"{reason}; --resume takes the one before it; restore it, or remove it",
        )
    if len(steps) > len(bad):
        looked = "every byte read and hashed" if deep else "sizes as in the manifest; --deep reads every byte"
        yield Finding("ok", "checkpoints", f"{len(steps) - len(bad)} complete ({looked})")
    aside = [path for path in paths if path.name.startswith("damaged-")]
    if aside:
        yield Finding(
            "warning",
            "checkpoints",
            f"{len(aside)} were damaged and set aside, {aside[0]} for one; look at them and remove them",
        )
    if not steps:
        yield Finding("warning", "checkpoints", "none yet: a run that dies now begins anew")


def find_damage(checkpoint: Path, *, deep: bool) -> str:
    """What is wrong with a checkpoint, "" if nothing is."""
    try:
        manifest = read_manifest(checkpoint)
        for record in manifest.files:
            file = checkpoint / record.path
            if file.is_symlink() or not file.is_file():
                return f"{record.path} is missing, or no plain file"
            if file.stat().st_size != record.size:
                return f"{record.path} has {file.stat().st_size} bytes, not {record.size}"
            if deep and compute_sha256(file) != record.sha256:
                return f"{record.path} is not as it was written: its SHA-256 differs"
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def examine_trackers(run_dir: RunDir, *, running: bool) -> Iterator[Finding]:
    """How much each tracker that ever followed has not taken yet."""
    for name in SINKS:
        path = position_path(run_dir.root, name)
        try:
            position = read_position(path)
            behind = 0 if position is None else count_unsent(run_dir.root, SINKS[name].files, position)
        except (RunDirError, OSError) as error:
            yield Finding("error", f"tracker {name}", str(error))
            continue
        if position is None:
            continue
        if behind and not running:
            text = f"{behind} bytes of rows were not sent; {describe_catching_up(run_dir.root, [name])}"
            yield Finding("warning", f"tracker {name}", text)
        left_out = describe_left_out(position)
        if left_out:
            yield Finding(
                "warning",
                f"tracker {name}",
                f"it does not have all rows: {left_out}; {path.with_suffix('.log')} may say why",
            )
        if not left_out and (running or not behind):
            yield Finding(
                "ok",
                f"tracker {name}",
                f"{position.number} rows sent{f', {behind} bytes to go' if behind else ''}",
            )
