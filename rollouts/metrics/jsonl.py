"""The metrics files of a run directory: append-only JSON lines, the truth that everything else reads.

    log_step ──────► metrics.jsonl        one row a step
    log_samples ───► samples.jsonl        up to samples_per_step rows a step
    log_evaluation ► evaluations.jsonl    one row an evaluation

A call is one write of whole lines to a file opened for appending, so a reader sees whole rows, and what was logged survives the death
of the process (not a power cut: the files are flushed to the device when the logger closes). A process killed inside a write can leave
a torn last line. The next attempt repairs it when it opens the file: a line that lacks only its newline gets it, any other torn line
is cut off. Rows of an earlier attempt are never touched; readers take the highest attempt per (stage, step).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from rollouts.crash_points import reach
from rollouts.errors import RunDirError, StorageError
from rollouts.metrics.progress import Progress
from rollouts.metrics.record import make_head, make_row
from rollouts.run_dir import RunDir
from rollouts.types import JSONValue, Sample, encode_json

Row = dict[str, Any]
OBJECT_KEYS = 32  # of a metadata object that is kept as one; more would make rows long however short each is
METADATA_CHARS = 2000  # of one metadata value as JSON; a longer one is cut, so that sample rows stay small
WAITING_BYTES = 1 << 26  # of rows of one file that wait for a disk that refuses them
TAIL_BYTES = 1 << 16  # how much of a file's end is read at a time when looking for its last newline


class JsonlLogger:
    """A MetricsLogger that writes the three files and, when given one, tells a Progress about each step. Made by open_jsonl_logger."""

    def __init__(
        self,
        files: Mapping[str, int],
        *,
        attempt: int,
        samples_per_step: int,
        progress: Progress | None,
        repaired_bytes: int,
        time_unix: Callable[[], float],
    ) -> None:
        self._files = files
        self._attempt = attempt
        self._samples_per_step = samples_per_step
        self._progress = progress
        self._time_unix = time_unix
        self._waiting: dict[str, bytes] = {}  # rows that the disk refused, by file
        self._refused = False  # whether that was said
        self._statistics = {"rows": 0, "sample_rows": 0, "evaluation_rows": 0, "repaired_bytes": repaired_bytes}

    async def log_step(self, stage: str, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Appends the row of a step. Raises MetricError, before anything is written, for a name or value that may not be written."""
        reach("metrics.before_row")
        self._append("metrics", [make_row(stage, step, policy_version, self._attempt, self._time_unix(), metrics)])
        reach("metrics.after_row")
        self._statistics["rows"] += 1
        if self._progress is not None:
            self._progress.update(stage, step, metrics)
        await trio.lowlevel.checkpoint()

    async def log_samples(self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]) -> None:
        """Appends up to samples_per_step of the samples, evenly spaced, so that every group has a chance to be seen."""
        head = make_head(stage, step, policy_version, self._attempt, self._time_unix())
        chosen = select_evenly(len(samples), self._samples_per_step)
        reach("metrics.before_samples")
        self._append("samples", [head | make_sample_fields(samples[index]) for index in chosen])
        reach("metrics.after_samples")
        self._statistics["sample_rows"] += len(chosen)
        await trio.lowlevel.checkpoint()

    async def log_evaluation(self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]) -> None:
        """Appends the row of an evaluation called `name`. Raises MetricError like log_step."""
        reach("metrics.before_evaluation")
        self._append("evaluations", [make_row(stage, step, policy_version, self._attempt, self._time_unix(), metrics, name=name)])
        reach("metrics.after_evaluation")
        self._statistics["evaluation_rows"] += 1
        await trio.lowlevel.checkpoint()

    def statistics(self) -> Mapping[str, float]:
        """Rows written by this attempt, and how many bytes of a torn line were cut off when the files were opened."""
        return dict(self._statistics)

    def _append(self, file: str, rows: Sequence[Row]) -> None:
        """Rows that the disk refuses wait in memory, are said once, and are written with the next. Raises StorageError when too many wait."""
        if not rows:
            return
        self._waiting[file] = self._waiting.get(file, b"") + "".join(encode_json(row) + "\n" for row in rows).encode()
        try:
            self._write_waiting(file)
        except StorageError as error:
            if len(self._waiting[file]) > WAITING_BYTES:
                raise
            if not self._refused:
                logging.getLogger("rollouts").warning("warning: %s; rows wait in memory until it takes them", error)
            self._refused = True

    def write_waiting(self) -> None:
        """Writes the rows that wait because a disk refused them. Raises StorageError if it still does: they are lost when the run ends."""
        for file in list(self._waiting):
            self._write_waiting(file)

    def _write_waiting(self, file: str) -> None:
        """All or nothing, so that no half row stays."""
        end = os.lseek(self._files[file], 0, os.SEEK_END)
        try:
            write_whole(self._files[file], self._waiting[file])
        except OSError as error:
            os.ftruncate(self._files[file], end)
            raise StorageError(f"rows of {file}.jsonl cannot be written ({error}); free space, or point output.dir at another disk") from error
        del self._waiting[file]
        self._refused = False


@asynccontextmanager
async def open_jsonl_logger(
    run_dir: RunDir,
    *,
    attempt: int,
    samples_per_step: int,
    progress: Progress | None = None,
    time_unix: Callable[[], float] = time.time,
) -> AsyncIterator[JsonlLogger]:
    """A logger on the files of `run_dir`, made if missing and repaired if torn; flushed to the device on the way out.

    Writes are made on the event loop: a row is a few kilobytes.
    """
    assert attempt >= 1 and samples_per_step >= 0, (attempt, samples_per_step)
    paths = {"metrics": run_dir.metrics, "samples": run_dir.samples, "evaluations": run_dir.evaluations}
    run_dir.root.mkdir(parents=True, exist_ok=True)
    repaired = sum(repair_last_line(path) for path in paths.values())
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for name, path in paths.items():
            files[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, files[name])
            stack.callback(os.fsync, files[name])
        logger = JsonlLogger(
            files,
            attempt=attempt,
            samples_per_step=samples_per_step,
            progress=progress,
            repaired_bytes=repaired,
            time_unix=time_unix,
        )
        try:
            yield logger
        finally:
            logger.write_waiting()


def write_whole(file: int, data: bytes) -> None:
    """Writes `data` in one call; a short write (a disk that fills up) is continued until the system refuses with its own OSError."""
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])


def repair_last_line(path: Path) -> int:
    """Bytes cut off the end of a JSON-lines file to make it end in a whole line; 0 for a file that is whole, missing or empty.

    A last line that is whole but for its newline is kept and gets the newline.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        while start > 0 and b"\n" not in tail:
            begin = max(0, start - TAIL_BYTES)
            file.seek(begin)
            tail = file.read(start - begin) + tail
            start = begin
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return 0
        if parse_row(torn) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return 0
        file.truncate(size - len(torn))
        return len(torn)


def parse_row(line: bytes) -> Row | None:
    """The JSON object on a line, None if there is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON-lines file, none if it is missing. A torn last line, as a running or killed writer leaves, is left out.

    Raises RunDirError naming file and line for anything else that is not a JSON object.
    """
    if not path.exists():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        row = parse_row(line)
        if row is None:
            raise RunDirError(f"{path}:{number} is not a JSON object ({line[:40]!r}…); the file is damaged: restore it, or delete that line")
        rows.append(row)
    last = parse_row(torn)
    return rows if last is None else [*rows, last]


def newest_attempts(rows: Iterable[Row]) -> list[Row]:
    """The rows of the highest attempt per (stage, step), and per name where rows have one, in the order of the file."""
    held = list(rows)
    newest: dict[tuple[object, ...], int] = {}
    for row in held:
        key = _row_key(row)
        newest[key] = max(newest.get(key, 0), row.get("attempt", 0))
    return [row for row in held if row.get("attempt", 0) == newest[_row_key(row)]]


def _row_key(row: Row) -> tuple[object, ...]:
    return row.get("stage"), row.get("step"), row.get("name")


def drop_outdated(evaluations: Iterable[Row], steps: Iterable[Row]) -> list[Row]:
    """The evaluations that are of weights which were not lost since, in the order of the file. `steps`: the rows of the metrics file.

    An evaluation after step N is outdated once a later attempt has trained step N of its stage, or one before it, again: that attempt had
    begun from an older checkpoint. Rows without a step and an attempt are left out.
    """
    first: dict[object, dict[int, int]] = {}  # stage → attempt → the first step that it trained
    for row in steps:
        if has_place(row):
            begun = first.setdefault(row.get("stage"), {})
            begun[row["attempt"]] = min(row["step"], begun.get(row["attempt"], row["step"]))
    return [
        row
        for row in evaluations
        if has_place(row)
        and not any(attempt > row["attempt"] and step <= row["step"] for attempt, step in first.get(row.get("stage"), {}).items())
    ]


def has_place(row: Row) -> bool:
    """Whether the row says of which step and attempt it is."""
    return type(row.get("step")) is int and type(row.get("attempt")) is int


def next_attempt(run_dir: RunDir) -> int:
    """1 for a run that has written no row, else one more than the highest attempt in its metrics, samples and evaluations.

    Samples count: an attempt that was killed between a step's samples and its row would else have its number used again, and readers would
    take both attempts' samples for one.
    """
    rows = [*read_rows(run_dir.metrics), *read_rows(run_dir.evaluations)]
    highest = max((row.get("attempt", 0) for row in rows), default=0)
    return 1 + max(highest, _read_last_attempt(run_dir.samples))


def _read_last_attempt(path: Path) -> int:
    """The attempt of the last whole row, 0 if there is none: attempts never decrease in a file, and reading all samples of a long run is slow."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        while start > 0:
            begin = max(0, start - TAIL_BYTES)
            file.seek(begin)
            tail = file.read(start - begin) + tail
            start = begin
            rows = [row for line in tail.split(b"\n")[1 if start else 0 :] if (row := parse_row(line)) is not None]
            if rows:
                return int(rows[-1].get("attempt", 0))
    return 0


def select_evenly(length: int, count: int) -> list[int]:
    """`count` indices below `length`, ascending and evenly spaced from 0; all of them if there are fewer."""
    chosen = min(length, count)
    return [index * length // chosen for index in range(chosen)]


def make_sample_fields(sample: Sample) -> Row:
    """What a sample row says after its head: text and numbers, no per-token arrays. What the sample does not have is absent."""
    versions = sample.weight_versions[sample.loss_mask]
    fields: Row = {
        "id": sample.id,
        "group_index": sample.group_index,
        "status": sample.status.value,
        "prompt": sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt),
        "response": sample.response,
        "reward": sample.reward,
        "rewards": dict(sample.rewards) or None,
        "tokens": len(sample.tokens),
        "response_length": sample.response_length,
        "weight_version_min": int(versions.min()) if len(versions) else None,
        "weight_version_max": int(versions.max()) if len(versions) else None,
        "metadata": {key: shorten_json(value) for key, value in sample.metadata.items()} or None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def shorten_json(value: JSONValue) -> JSONValue:
    """The value, or the beginning of its JSON text and a remark if that is longer than METADATA_CHARS. Of an object, each value by itself."""
    text = encode_json(value)
    if len(text) <= METADATA_CHARS:
        return value
    if isinstance(value, Mapping) and len(value) <= OBJECT_KEYS:
        return {key: shorten_json(inner) for key, inner in value.items()}
    if isinstance(value, str):
        return f"{value[:METADATA_CHARS]}… ({len(value)} characters)"
    return f"{text[:METADATA_CHARS]}… ({len(text)} characters)"
