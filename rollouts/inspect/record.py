"""The rows of a run directory, read through DuckDB.

    RUN/*.jsonl ─► read_json with the schema below ─► views, tables ─► rows, numpy columns

Each kind of file has the views NAME_lines (a damaged line is NULL throughout), NAME_all (every attempt) and
NAME (the newest attempt at each step). The connection opens these files only and loads no extension.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from rollouts.errors import RunDirError
from rollouts.metrics.jsonl import Row
from rollouts.run_dir import RunDir, check_links, checkpoint_manifest, list_parts, parse_step

HEAD = "schema BIGINT, stage VARCHAR, step BIGINT, policy_version BIGINT, attempt BIGINT, time_unix DOUBLE"
# of the rows of each kind, beside HEAD; metrics and evaluations also have a column for each metric
FIELDS = {
    "metrics": "",
    "evaluations": "name VARCHAR",
    "samples": "id VARCHAR, group_index BIGINT, status VARCHAR, reward DOUBLE, tokens BIGINT,"
    " response_length BIGINT, weight_version_min BIGINT, weight_version_max BIGINT, prompt JSON,"
    " response VARCHAR, rewards JSON, rewards_cut BIGINT, metadata JSON, metadata_cut BIGINT",
    "contributions": "update BIGINT, loss DOUBLE, denominator DOUBLE, skipped VARCHAR, id VARCHAR,"
    " group_index BIGINT, row BIGINT, advantage DOUBLE, weight DOUBLE, share DOUBLE, tokens BIGINT,"
    " reward DOUBLE, shard VARCHAR, offset BIGINT, length BIGINT",
    "spans": "name VARCHAR, track VARCHAR, id VARCHAR, start_unix DOUBLE, duration_s DOUBLE, tokens BIGINT",
}
KINDS = tuple(FIELDS)
IS_ROW = "stage IS NOT NULL AND step IS NOT NULL AND attempt IS NOT NULL"
MEMORY = "2GB"
THREADS = 4
LONGEST_ROW = 1 << 26  # bytes of a line
TAIL_BYTES = 1 << 20  # of a file, in which its torn last line is looked for


@dataclass(frozen=True, slots=True)
class Stage:
    """The newest rows of metrics.jsonl of one stage, by step."""

    name: str
    columns: Mapping[str, np.ndarray]  # step and attempt int64; time_unix and metrics float64, NaN for none

    def __len__(self) -> int:
        return len(self.columns["step"])

    @property
    def metrics(self) -> list[str]:
        """Metrics that have a value in some step, by name."""
        return [
            name for name in self.columns if name not in list_fields("metrics") and len(self.series(name)[1])
        ]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, of the rows that have it."""
        values = self.columns.get(name)
        if values is None:
            return np.empty(0, np.int64), np.empty(0)
        held = np.isfinite(values)
        return self.columns["step"][held], values[held]

    def sum_below(self, prefix: str) -> dict[str, float]:
        """The sum of each metric whose name begins with `prefix`, without the prefix, where it is not 0."""
        names = [name for name in self.columns if name.startswith(prefix)]
        sums = {name.removeprefix(prefix): float(self.series(name)[1].sum()) for name in names}
        return {name: total for name, total in sums.items() if total}


class Record:
    """A run's rows. Made by open_record."""

    def __init__(self, run_dir: RunDir, connection: duckdb.DuckDBPyConnection) -> None:
        self.run_dir = run_dir
        self.root = run_dir.root
        self.connection = connection
        self.notes: list[str] = []  # for a person: lines that were left out
        self._parts = {kind: find_parts(run_dir, kind) for kind in KINDS}

    def files(self, kind: str) -> list[Path]:
        """The files of a kind that are not empty."""
        return self._parts[kind]

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """The rows of a statement, without absent values; JSON is decoded."""
        return list(self.iterate_rows(sql, parameters))

    def iterate_rows(self, sql: str, parameters: Sequence[object] = ()) -> Iterator[Row]:
        """The rows of a statement, one after another. No other statement may run until it has ended."""
        result = self.connection.execute(sql, list(parameters))
        names = [(column[0], str(column[1]) == "JSON") for column in result.description or ()]
        while batch := result.fetchmany(1000):
            for row in batch:
                yield {
                    name: json.loads(value) if is_json else value
                    for (name, is_json), value in zip(names, row, strict=True)
                    if value is not None and value == value
                }

    def columns(self, sql: str, parameters: Sequence[object] = ()) -> dict[str, np.ndarray]:
        """The columns of a statement; absent numbers are NaN, absent texts "", texts are objects."""
        found: dict[str, Any] = self.connection.execute(sql, list(parameters)).fetchnumpy()
        return {name: fill_absent(values) for name, values in found.items()}

    def add_views(self, kind: str) -> list[str]:
        """The columns of the views of a kind, which are made."""
        parts = [quote_text(str(part)) for part in self._parts[kind]]
        columns = list_fields(kind)
        if kind in ("metrics", "evaluations"):
            columns = columns | dict.fromkeys(self._find_metrics(kind), "DOUBLE")
        if parts:
            schema = ", ".join(f"{quote_name(name)}: '{kind}'" for name, kind in columns.items())
            lines = f"SELECT * FROM read_json({json_options(parts)}, columns = {{{schema}}})"
        else:
            empty = ", ".join(f"NULL::{kind} AS {quote_name(name)}" for name, kind in columns.items())
            lines = f"SELECT {empty} WHERE false"
        key = "stage, step, name" if kind == "evaluations" else "stage, step"
        newest = f"SELECT {key}, max(attempt) FROM {kind}_all GROUP BY ALL"
        self.connection.execute(f"CREATE OR REPLACE VIEW {kind}_lines AS {lines}")
        self.connection.execute(
            f"CREATE OR REPLACE VIEW {kind}_all AS SELECT * FROM {kind}_lines WHERE {IS_ROW}"
        )
        self.connection.execute(
            f"CREATE OR REPLACE VIEW {kind} AS SELECT * FROM {kind}_all WHERE ({key}, attempt) IN ({newest})"
        )
        return list(columns)

    def load(self, kind: str, select: str = "*", parameters: Sequence[object] = ()) -> None:
        """Makes the table NAME_held of what is selected of the newest rows, with `place`, the number of the
        line.

        `select` must hold stage, step and attempt. Lines that are left out are noted.
        """
        self.add_views(kind)
        torn = self._describe_torn(kind)
        self.connection.execute(
            f"CREATE OR REPLACE TABLE {kind}_held AS SELECT row_number() OVER () AS place, {select}"
            f" FROM {kind}_lines",
            list(parameters),
        )
        removed = self.connection.execute(f"DELETE FROM {kind}_held WHERE NOT ({IS_ROW})").fetchone()
        self.note_damage(kind, removed[0] if removed else 0, torn)
        key = "stage, step, name" if kind == "evaluations" else "stage, step"
        self.connection.execute(
            f"DELETE FROM {kind}_held WHERE ({key}, attempt) NOT IN"
            f" (SELECT {key}, max(attempt) FROM {kind}_held GROUP BY ALL)"
        )

    def note_damage(self, kind: str, lines: int, torn: str) -> None:
        """Notes how many lines of a kind are no rows."""
        damaged = lines - bool(torn)
        if damaged > 0:
            self.notes.append(
                f"{self.root / kind}.jsonl: {damaged} damaged line{'' if damaged == 1 else 's'} left out"
            )
        if torn:
            self.notes.append(torn)

    def check_lines(self, kind: str) -> None:
        """Notes the lines of a kind that are no rows."""
        torn = self._describe_torn(kind)
        found = self.connection.execute(f"SELECT count(*) FROM {kind}_lines WHERE NOT ({IS_ROW})").fetchone()
        self.note_damage(kind, found[0] if found else 0, torn)

    def read_places(self, kind: str, places: Sequence[int]) -> list[Row]:
        """The rows at these places, in their order."""
        if not len(places):
            return []
        found = self.rows(
            f"SELECT * FROM (SELECT row_number() OVER () AS place, * FROM {kind}_lines)"
            " WHERE place IN (SELECT unnest(?::BIGINT[]))",
            [[int(place) for place in places]],
        )
        by_place = {row.pop("place"): row for row in found}
        return [by_place[int(place)] for place in places if int(place) in by_place]

    @cached_property
    def stages(self) -> dict[str, Stage]:
        """Stages that have steps, in order of appearance."""
        self.load("metrics")
        found = self.columns("SELECT * EXCLUDE (schema) FROM metrics_held ORDER BY place")
        names = found.pop("stage")
        del found["place"]
        stages: dict[str, Stage] = {}
        for stage in dict.fromkeys(names.tolist()):
            own = np.flatnonzero(names == stage)
            own = own[np.argsort(found["step"][own], kind="stable")]
            stages[stage] = Stage(stage, {name: values[own] for name, values in found.items()})
        return stages

    @cached_property
    def evaluations(self) -> list[Row]:
        """The newest evaluation of each stage, step and name, in the order of the file."""
        self.load("evaluations")
        return self.rows("SELECT * EXCLUDE (place) FROM evaluations_held ORDER BY place")

    @property
    def attempts(self) -> int:
        """How often the run was started, as far as rows tell."""
        newest = [int(stage.columns["attempt"].max()) for stage in self.stages.values()]
        return max([*newest, *(row["attempt"] for row in self.evaluations)], default=0)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary of a finished run, empty if there is none. Raises RunDirError if it is damaged."""
        path = self.run_dir.summary
        if not path.exists():
            return {}
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            assert isinstance(summary, dict)
        except (ValueError, AssertionError) as error:
            raise RunDirError(
                f"{path} is no JSON object ({error}); delete it and run again with --resume"
            ) from error
        return summary

    @cached_property
    def checkpoints(self) -> list[tuple[str, int]]:
        """Stage and step of every complete checkpoint, the oldest first."""
        return find_checkpoints(self.run_dir)

    def _find_metrics(self, kind: str) -> list[str]:
        """Names of the fields of a kind that are metrics. DuckDB tells apart no names by case: the first
        stays.
        """
        parts = [quote_text(str(part)) for part in self._parts[kind]]
        if not parts:
            return []
        source = f"read_ndjson_objects({json_options(parts)})"
        found = self.connection.execute(
            f"SELECT DISTINCT unnest(json_keys(json)) FROM {source} WHERE json_type(json) = 'OBJECT'"
        ).fetchall()
        names = {name.lower(): name for (name,) in sorted(found, reverse=True) if name}
        return sorted(names[low] for low in names.keys() - list_fields(kind).keys())

    def _describe_torn(self, kind: str) -> str:
        """A sentence if the last file of a kind ends within a line that is no row, else ""."""
        for part in self._parts[kind][-1:]:
            size = part.stat().st_size
            with part.open("rb") as file:
                file.seek(max(0, size - TAIL_BYTES))
                torn = file.read().rpartition(b"\n")[2]
            try:
                json.loads(torn or b"0")
            except ValueError:
                return f"{part}: the torn last line ({len(torn)} bytes) is left out"
        return ""


@contextmanager
def open_record(root: Path) -> Iterator[Record]:
    """The record of the run at `root`. Raises RunDirError if it is not a run directory, or cannot be read."""
    run_dir = open_run_dir(root)
    check_links(run_dir)
    paths = [quote_text(str(part)) for kind in KINDS for part in find_parts(run_dir, kind)]
    with duckdb.connect(":memory:") as connection:
        for setting in (
            f"threads = {min(THREADS, os.cpu_count() or 1)}",
            f"memory_limit = '{MEMORY}'",
            "temp_directory = ''",
            "autoinstall_known_extensions = false",
            "autoload_known_extensions = false",
            f"allowed_paths = [{', '.join(paths)}]",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            connection.execute(f"SET {setting}")
        try:
            yield Record(run_dir, connection)
        except duckdb.Error as error:
            raise RunDirError(f"{root}: {str(error).splitlines()[0]}") from error


def open_run_dir(root: Path) -> RunDir:
    """The paths of the run at `root`. Raises RunDirError if it is not a run directory."""
    run_dir = RunDir(root)
    if not root.is_dir():
        raise RunDirError(f"{root} is not a directory; name a run directory, for example one in runs/")
    known = (run_dir.config, run_dir.metrics, run_dir.evaluations, run_dir.summary)
    if not any(path.exists() for path in known):
        names = ", ".join(path.name for path in known)
        raise RunDirError(f"{root} has none of {names}: it is not a run directory")
    return run_dir


def find_checkpoints(run_dir: RunDir) -> list[tuple[str, int]]:
    """Stage and step of every complete checkpoint, the oldest first."""
    found: list[tuple[float, str, int]] = []
    for path in run_dir.checkpoints.glob("*/*"):
        step, manifest = parse_step(path.name), checkpoint_manifest(path)
        if step is not None and manifest.exists():
            found.append((manifest.stat().st_mtime, path.parent.name, step))
    return [(stage, step) for _, stage, step in sorted(found)]


def list_fields(kind: str) -> dict[str, str]:
    """The fields that every kind of row has and those of this kind, with their SQL types."""
    fields = f"{HEAD}, {FIELDS[kind]}" if FIELDS[kind] else HEAD
    return dict(field.split() for field in fields.split(", "))


def find_parts(run_dir: RunDir, kind: str) -> list[Path]:
    """The files of a kind that are not empty, absolute, in the order in which they were written."""
    parts = list_parts(run_dir.root.absolute() / f"{kind}.jsonl")
    return [part for part in parts if part.stat().st_size]


def json_options(parts: Sequence[str]) -> str:
    """The arguments of read_json: the files, one row a line, damaged lines as NULL."""
    return (
        f"[{', '.join(parts)}], format = 'newline_delimited', ignore_errors = true,"
        f" maximum_object_size = {LONGEST_ROW}"
    )


def fill_absent(values: Any) -> np.ndarray:
    """The values of a DuckDB column, NaN or "" where there is none."""
    if not np.ma.is_masked(values):
        return np.ma.getdata(values)
    return values.filled("") if values.dtype == object else values.astype(np.float64).filled(np.nan)


def quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
