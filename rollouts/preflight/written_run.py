"""Whether the files and checkpoints of a run are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollouts.checkpoints.manifest import compute_sha256, read_manifest
from rollouts.errors import CheckpointError
from rollouts.metrics.jsonl import parse_row
from rollouts.preflight.findings import Finding
from rollouts.run_dir import RunDir, find_activity, list_parts, parse_step

SHOWN = 5  # damaged lines that are named


def check_written_run(run_dir: RunDir, *, deep: bool) -> list[Finding]:
    """All findings about the files of a run. `deep`: every byte of its checkpoints is read."""
    running = find_activity(run_dir).may_go_on
    rows = [check_rows(parts, running=running) for path in run_dir.row_files if (parts := list_parts(path))]
    return [*rows, *check_checkpoints(run_dir, deep=deep)]


def check_rows(parts: list[Path], *, running: bool) -> Finding:
    """Whether every line of a file is a row. The last line of a running writer may be incomplete."""
    rows, torn, damaged = 0, 0, list[str]()
    for part in parts:
        with part.open("rb") as file:
            for number, line in enumerate(file, 1):
                if parse_row(line) is not None:
                    rows += 1
                elif part == parts[-1] and not line.endswith(b"\n"):
                    torn = len(line)
                else:
                    damaged.append(f"{part.name}:{number}")
    if damaged:
        named = ", ".join(damaged[:SHOWN]) + (" and more" if len(damaged) > SHOWN else "")
        return Finding(
            "error",
            parts[0].name,
            f"{len(damaged)} lines are no JSON object ({named}); restore the file, or delete them",
        )
    if torn and not running:
        return Finding(
            "warning",
            parts[0].name,
            f"{rows} rows; the last line is torn ({torn} bytes): its writer was killed; --resume repairs it",
        )
    return Finding("ok", parts[0].name, f"{rows} rows")


def check_checkpoints(run_dir: RunDir, *, deep: bool) -> Iterator[Finding]:
    """Whether each checkpoint holds what its manifest says."""
    paths = [path for path in sorted(run_dir.checkpoints.glob("*/*")) if path.is_dir()]
    steps = [path for path in paths if parse_step(path.name) is not None]
    damage = {path: reason for path in steps if (reason := find_damage(path, deep=deep))}
    for path, reason in damage.items():
        subject = str(path.relative_to(run_dir.root))
        yield Finding("error", subject, f"{reason}; --resume takes the one before it; restore or remove it")
    if len(steps) > len(damage):
        looked = "every byte read and hashed" if deep else "sizes as in the manifest; --deep reads every byte"
        yield Finding("ok", "checkpoints", f"{len(steps) - len(damage)} complete ({looked})")
    aside = [path for path in paths if path.name.startswith("damaged-")]
    if aside:
        yield Finding("warning", "checkpoints", f"{len(aside)} were damaged and set aside, as {aside[0]}")
    if not steps:
        yield Finding("warning", "checkpoints", "none yet: a run that dies now begins anew")


def find_damage(checkpoint: Path, *, deep: bool) -> str:
    """What is wrong with a checkpoint, "" if nothing is."""
    try:
        for record in read_manifest(checkpoint).files:
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
