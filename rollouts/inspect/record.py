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
# of the rows of each kind; metrics and evaluations also have a column for each metric
FIELDS = {
    "metrics": HEAD,
    "evaluations": f"{HEAD}, name VARCHAR",
    "samples": f"{HEAD}, id VARCHAR, group_index BIGINT, status VARCHAR, reward DOUBLE, tokens BIGINT,"
    " response_length BIGINT, weight_version_min BIGINT, weight_version_max BIGINT, prompt JSON,"
    " response VARCHAR, rewards JSON, rewards_cut BIGINT, metadata JSON, metadata_cut BIGINT",
    "contributions": f"{HEAD}, update BIGINT, loss DOUBLE, denominator DOUBLE, skipped VARCHAR, id VARCHAR,"
    " group_index BIGINT, row BIGINT, advantage DOUBLE, weight DOUBLE, share DOUBLE, tokens BIGINT,"
    " reward DOUBLE, shard VARCHAR, offset BIGINT, length BIGINT",
    "spans": f"{HEAD}, name VARCHAR, track VARCHAR, id VARCHAR, start_unix DOUBLE, duration_s DOUBLE,"
    " tokens BIGINT",
}
KINDS = tuple(FIELDS)
IS_ROW = "(stage IS NOT NULL AND step IS NOT NULL AND attempt IS NOT NULL)"
# one row a line of up to 64 MiB; a damaged line is a row of NULL
JSON_OPTIONS = "format = 'newline_delimited', ignore_errors = true, maximum_object_size = 67108864"
SETTINGS = (
    f"threads = {min(4, os.cpu_count() or 1)}",
    "memory_limit = '2GB'",
    "temp_directory = ''",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
)
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
        known = list_fields("metrics")
        return [name for name in self.columns if name not in known and len(self.series(name)[1])]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, of the rows that have it."""
        values = self.columns.get(name, np.full(len(self), np.nan))
        held = np.isfinite(values)
        return self.columns["step"][held], values[held]

    def filled(self, name: str) -> np.ndarray:
        """The values of a metric in every row, 0 where a row has none."""
        return np.nan_to_num(self.columns.get(name, np.zeros(len(self))))

    def sum_below(self, prefix: str) -> dict[str, float]:
        """The sum of each metric whose name begins with `prefix`, without the prefix, where it is not 0; the
        largest first.
        """
        sums = {
            name.removeprefix(prefix): float(self.filled(name).sum())
            for name in self.columns
            if name.startswith(prefix)
        }
        return {name: sums[name] for name in sorted(sums, key=lambda name: -sums[name]) if sums[name]}


class Record:
    """A run's rows. Made by open_record."""

    def __init__(self, run_dir: RunDir, connection: duckdb.DuckDBPyConnection) -> None:
        self.run_dir = run_dir
        self.root = run_dir.root
        self.connection = connection
        self.notes: list[str] = []  # for a person: lines that were left out

    def iterate_rows(self, sql: str, parameters: Sequence[object] = ()) -> Iterator[Row]:
        """The rows of a statement without absent values, JSON decoded. No other statement may run until it
        has ended.
        """
        result = self.connection.execute(sql, list(parameters))
        names = [(column[0], str(column[1]) == "JSON") for column in result.description or ()]
        while batch := result.fetchmany(1000):
            for row in batch:
                yield {
                    name: json.loads(value) if is_json else value
                    for (name, is_json), value in zip(names, row, strict=True)
                    if value is not None and value == value
                }

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """All rows of a statement, as iterate_rows gives them."""
        return list(self.iterate_rows(sql, parameters))

    def columns(self, sql: str, parameters: Sequence[object] = ()) -> dict[str, np.ndarray]:
        """The columns of a statement; absent numbers are NaN, absent texts "", texts are objects."""
        found: dict[str, Any] = self.connection.execute(sql, list(parameters)).fetchnumpy()
        for name, values in found.items():
            if np.ma.is_masked(values):
                is_text = values.dtype == object
                found[name] = values.filled("") if is_text else values.astype(np.float64).filled(np.nan)
        return {name: np.ma.getdata(values) for name, values in found.items()}

    def add_views(self, kind: str) -> list[str]:
        """The columns of the views of a kind, which are made."""
        columns = list_fields(kind)
        files = ", ".join(quote_text(str(part)) for part in find_parts(self.run_dir, kind))
        if files and kind in ("metrics", "evaluations"):
            found = self.connection.execute(
                f"SELECT DISTINCT unnest(json_keys(json)) FROM read_ndjson_objects([{files}], {JSON_OPTIONS})"
                " WHERE json_type(json) = 'OBJECT'"
            ).fetchall()
            # DuckDB does not tell names apart by case: the first of equal ones stays
            names = {name.lower(): name for (name,) in sorted(found, reverse=True) if name}
            columns |= {names[low]: "DOUBLE" for low in sorted(names.keys() - columns.keys())}
        schema = ", ".join(f"{quote_name(name)}: '{kind}'" for name, kind in columns.items())
        empty = ", ".join(f"NULL::{kind} AS {quote_name(name)}" for name, kind in columns.items())
        lines = f"FROM read_json([{files}], {JSON_OPTIONS}, columns = {{{schema}}})"
        for name, select in (
            (f"{kind}_lines", lines if files else f"SELECT {empty} WHERE false"),
            (f"{kind}_all", f"FROM {kind}_lines WHERE {IS_ROW}"),
            (kind, f"FROM {kind}_all WHERE {is_newest(kind, f'{kind}_all')}"),
        ):
            self.connection.execute(f"CREATE OR REPLACE VIEW {name} AS {select}")
        return list(columns)

    def load(self, kind: str, select: str = "*", parameters: Sequence[object] = ()) -> None:
        """Makes the table NAME_held of what is selected of the newest rows, with `place`, the number of the
        line. `select` must hold stage, step and attempt. Lines that are left out are noted.
        """
        self.add_views(kind)
        held = f"{kind}_held"
        self.connection.execute(
            f"CREATE OR REPLACE TABLE {held} AS SELECT row_number() OVER () AS place, {select}"
            f" FROM {kind}_lines",
            list(parameters),
        )
        self.note_damage(kind, held)
        self.connection.execute(f"DELETE FROM {held} WHERE NOT {IS_ROW}")
        self.connection.execute(f"DELETE FROM {held} WHERE NOT {is_newest(kind, held)}")

    def note_damage(self, kind: str, table: str) -> None:
        """Notes how many lines of a table are no rows, and a torn last line apart."""
        torn = b""
        for part in find_parts(self.run_dir, kind)[-1:]:
            with part.open("rb") as file:
                file.seek(max(0, part.stat().st_size - TAIL_BYTES))
                torn = file.read().rpartition(b"\n")[2]
        try:
            json.loads(torn or b"0")
            torn = b""
        except ValueError:
            self.notes.append(f"{kind}.jsonl: the torn last line ({len(torn)} bytes) is left out")
        found = self.connection.execute(f"SELECT count(*) FROM {table} WHERE NOT {IS_ROW}").fetchall()
        if damaged := found[0][0] - bool(torn):
            self.notes.append(f"{kind}.jsonl: {damaged} damaged line{'' if damaged == 1 else 's'} left out")

    def read_places(self, kind: str, places: Sequence[int]) -> list[Row]:
        """The rows at these places, in their order."""
        if not len(places):
            return []
        found = self.rows(
            f"FROM (SELECT row_number() OVER () AS place, * FROM {kind}_lines)"
            " WHERE place IN (SELECT unnest(?::BIGINT[]))",
            [list(map(int, places))],
        )
        by_place = {row.pop("place"): row for row in found}
        return [by_place[place] for place in places]

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
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError) as error:
            raise RunDirError(
                f"{path} is no JSON object ({error}); delete it and run again with --resume"
            ) from error


@contextmanager
def open_record(root: Path) -> Iterator[Record]:
    """The record of the run at `root`. Raises RunDirError if it is not a run directory, or cannot be read."""
    run_dir = open_run_dir(root)
    check_links(run_dir)
    paths = ", ".join(quote_text(str(part)) for kind in KINDS for part in find_parts(run_dir, kind))
    with duckdb.connect(":memory:") as connection:
        closing = f"allowed_paths = [{paths}]", "enable_external_access = false", "lock_configuration = true"
        for setting in (*SETTINGS, *closing):
            connection.execute(f"SET {setting}")
        try:
            yield Record(run_dir, connection)
        except duckdb.Error as error:
            raise RunDirError(f"{root}: {str(error).splitlines()[0]}") from error


def open_run_dir(root: Path) -> RunDir:
    """The paths of the run at `root`. Raises RunDirError if it is not a run directory."""
    run_dir = RunDir(root)
    known = (run_dir.config, run_dir.metrics, run_dir.evaluations, run_dir.summary)
    if not any(path.exists() for path in known):
        names = ", ".join(path.name for path in known)
        raise RunDirError(f"{root} is not a run directory: it has none of {names}")
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
    """The fields of a kind's rows with their SQL types."""
    return dict(field.split() for field in FIELDS[kind].split(", "))


def find_parts(run_dir: RunDir, kind: str) -> list[Path]:
    """The files of a kind that are not empty, absolute, in the order in which they were written."""
    parts = list_parts(run_dir.root.absolute() / f"{kind}.jsonl")
    return [part for part in parts if part.stat().st_size]


def is_newest(kind: str, table: str) -> str:
    """The SQL condition that a row of a table is of the newest attempt at its step."""
    key = "stage, step, name" if kind == "evaluations" else "stage, step"
    return f"({key}, attempt) IN (SELECT {key}, max(attempt) FROM {table} GROUP BY ALL)"


def quote_name(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """A text as SQL has it."""
    return "'" + text.replace("'", "''") + "'"
