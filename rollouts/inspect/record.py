"""The rows of a run directory, read through DuckDB.

    RUN/*.jsonl ─► read_json with the schema below ─► views ─► tables of the newest rows ─► rows, curves

Each kind of file has the views NAME_lines (a damaged line is NULL throughout), NAME_all (every attempt) and
NAME (the newest attempt at each step). The connection opens these files only and loads no extension.

What there is to say of a run: tables and statements that the commands and the report share.
"""

import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np

from rollouts.config.secrets import flatten_settings, remove_secrets
from rollouts.errors import RunDirError
from rollouts.metrics.jsonl import Row, parse_row, read_backwards
from rollouts.run_dir import RunDir, check_links, checkpoint_manifest, list_parts, open_run_dir, parse_step

HEAD = "schema BIGINT, stage VARCHAR, step BIGINT, policy_version BIGINT, attempt BIGINT, time_unix DOUBLE, "
FIELDS = {
    "metrics": "",
    "evaluations": "name VARCHAR",
    "samples": "id VARCHAR, group_index BIGINT, status VARCHAR, reward DOUBLE, tokens BIGINT,"
    " response_length BIGINT, weight_version_min BIGINT, weight_version_max BIGINT, prompt JSON,"
    " response VARCHAR, rewards JSON, rewards_cut BIGINT, metadata JSON, metadata_cut BIGINT,"
    " messages JSON, trajectory JSON",
    "contributions": "update BIGINT, loss DOUBLE, denominator DOUBLE, skipped VARCHAR, id VARCHAR,"
    " group_index BIGINT, row BIGINT, advantage DOUBLE, weight DOUBLE, share DOUBLE, tokens BIGINT,"
    " reward DOUBLE, rewards JSON, kl DOUBLE, shard VARCHAR, offset BIGINT, length BIGINT",
    "spans": "name VARCHAR, track VARCHAR, id VARCHAR, start_unix DOUBLE, duration_s DOUBLE, tokens BIGINT",
}
# of the rows of each kind of file; metrics and evaluations also have a column for each metric
COLUMNS = {
    kind: dict(field.split() for field in (HEAD + fields).split(", ") if field)
    for kind, fields in FIELDS.items()
}
IS_ROW = "(stage IS NOT NULL AND step IS NOT NULL AND attempt IS NOT NULL)"
# one row a line of up to 64 MiB; a damaged line is a row of NULL
JSON_OPTIONS = "format = 'newline_delimited', ignore_errors = true, maximum_object_size = 67108864"
SETTINGS = f"""
    SET threads = {min(4, os.cpu_count() or 1)};
    SET memory_limit = '2GB';
    SET temp_directory = '';
    SET autoinstall_known_extensions = false;
    SET autoload_known_extensions = false;"""
CLOSING = "SET allowed_paths = [{}]; SET enable_external_access = false; SET lock_configuration = true"
# How values are shown: numbers with four digits and no exponent where the whole part is longer; means as a
# course between the lowest and the highest, a blank for none.
SHOWING = """
    CREATE MACRO brief(x) AS
        if(abs(x) >= 1e4 AND abs(x) < 1e7, printf('%.0f', x), format('{:.4g}', x));
    CREATE MACRO bar(share) AS
        repeat('█', round(least(1, greatest(0, share)) * getvariable('room'))::INT);
    CREATE MACRO percent(part, whole) AS printf('%.1f %%', 100 * part / nullif(whole, 0));
    CREATE MACRO sparkline(means) AS array_to_string([CASE WHEN mean IS NULL THEN ' ' ELSE
        substr('▁▂▃▄▅▆▇█', 1 + least(7, floor(8 * coalesce(
            (mean - list_min(means)) / nullif(list_max(means) - list_min(means), 0), 0.5)))::INT, 1) END
        FOR mean IN means], '')"""
# `points`: a row for each finite value of a metric or an evaluation; `totals`: a row for each stage and
# name; `stages`: those that have steps, in order of appearance. A place is the number of a line of its file.
POINTS = """
    CREATE VIEW points AS FROM (
        UNPIVOT (SELECT *, rowid AS place, NULL::DOUBLE AS "no metric" FROM metrics_held)
        ON COLUMNS(* EXCLUDE (schema, stage, step, policy_version, attempt, time_unix, place))
        INTO NAME name VALUE value
        UNION ALL BY NAME
        UNPIVOT (SELECT * EXCLUDE (name), rowid AS place, NULL::DOUBLE AS "no metric" FROM evaluations_held)
        ON COLUMNS(* EXCLUDE (schema, stage, step, policy_version, attempt, time_unix, place))
        INTO NAME name VALUE value)
    WHERE isfinite(value);
    CREATE TABLE totals AS
    SELECT stage, name, sum(value) AS total, min(value) AS low, max(value) AS high,
        arg_min(value, step) AS first, arg_max(value, step) AS last,
        max(step) FILTER (value != 0) AS last_step
    FROM points GROUP BY stage, name;
    CREATE TABLE stages AS
    SELECT stage, count(*) AS rows, min(step) AS first, max(step) AS last, max(attempt) AS attempt
    FROM metrics_held GROUP BY stage ORDER BY min(rowid)"""


class Curve(NamedTuple):
    """One metric of one stage of a run."""

    stage: str
    name: str
    steps: np.ndarray  # int64, ascending
    values: np.ndarray  # float64, finite
    run: str = ""


class Record:
    """A run's rows. Made by open_record."""

    def __init__(self, run_dir: RunDir, connection: duckdb.DuckDBPyConnection) -> None:
        self.run_dir = run_dir
        self.root = run_dir.root
        self.connection, self.execute = connection, connection.execute
        self.notes = []  # for a person: lines that were left out

    def iterate_rows(self, sql: str, parameters: object = None) -> Iterator[Row]:
        """The rows of a statement without absent values, JSON decoded. No other statement may run until it
        has ended.
        """
        result = self.execute(sql, parameters)
        names = [(column[0], str(column[1]) == "JSON") for column in result.description or ()]
        while batch := result.fetchmany(1000):
            for row in batch:
                yield {
                    name: json.loads(value) if is_json else value
                    for (name, is_json), value in zip(names, row, strict=True)
                    if value is not None and value == value
                }

    def rows(self, sql: str, parameters: object = None) -> list[Row]:
        """All rows of a statement, as iterate_rows gives them."""
        return list(self.iterate_rows(sql, parameters))

    def add_views(self, kind: str) -> None:
        """Makes the views of a kind."""
        columns = COLUMNS[kind]
        if kind in ("metrics", "evaluations"):
            # DuckDB does not tell names apart by case: the first of equal ones stays
            found = self.rows(
                "SELECT min(name) AS name FROM (SELECT unnest(names) AS name FROM (SELECT DISTINCT"
                " json_keys(json) AS names FROM"
                f" read_ndjson_objects([{self.list_files(kind)}], {JSON_OPTIONS})"
                " WHERE json_type(json) = 'OBJECT')) WHERE name != '' GROUP BY lower(name) ORDER BY 1"
            )
            columns = columns | {row["name"]: "DOUBLE" for row in found if row["name"].lower() not in columns}
        schema = ", ".join(f"{quote_name(name)}: '{form}'" for name, form in columns.items())
        self.execute(
            f"CREATE OR REPLACE VIEW {kind}_lines AS"
            f" FROM read_json([{self.list_files(kind)}], {JSON_OPTIONS}, columns = {{{schema}}});"
            f"CREATE OR REPLACE VIEW {kind}_all AS FROM {kind}_lines WHERE {IS_ROW};"
            f"CREATE OR REPLACE VIEW {kind} AS FROM {kind}_all WHERE {is_newest(kind, f'{kind}_all')}"
        )

    def load(self, kind: str, select: str = "*", parameters: Sequence[object] = ()) -> None:
        """Makes the table NAME_held of what is selected of the newest rows; its rowid is the number of the
        line. `select` must hold stage, step and attempt. Lines that are left out are noted.
        """
        self.add_views(kind)
        held = f"{kind}_held"
        self.execute(f"CREATE OR REPLACE TABLE {held} AS SELECT {select} FROM {kind}_lines", parameters)
        self.note_damage(kind, held)
        self.execute(f"DELETE FROM {held} WHERE NOT {IS_ROW} OR NOT {is_newest(kind, held)}")

    def note_damage(self, kind: str, table: str) -> None:
        """Notes how many lines of a table are no rows, and a torn last line apart."""
        parts = find_parts(self.run_dir, kind)
        last = next(read_backwards(parts[-1])) if parts else b"\n"
        if torn := not last.endswith(b"\n") and parse_row(last) is None:
            self.notes.append(f"{kind}.jsonl: the torn last line ({len(last)} bytes) is left out")
        (found,) = self.rows(f"SELECT count(*) AS damaged FROM {table} WHERE NOT {IS_ROW}")
        if damaged := found["damaged"] - torn:
            self.notes.append(f"{kind}.jsonl: {count_of(damaged, 'damaged line')} left out")

    def load_samples(self, more: str, parameters: Sequence[object] = ()) -> None:
        """Makes samples_held of SAMPLE_FACTS and `more` columns, with one row for each trajectory: its last,
        which has the tokens of all segments, and their oldest and newest version.
        """
        self.add_views("contributions")
        self.load("samples", SAMPLE_FACTS + more, parameters)
        self.execute(WHOLE)

    def read_samples(self, places: Sequence[int], select: str = "* EXCLUDE (place, nth)") -> list[Row]:
        """What is selected of the rows at these places, in their order, with what samples_held knows of the
        whole trajectory.
        """
        return self.rows(
            f"""SELECT {select} FROM (
                SELECT line.* REPLACE (held.tokens AS tokens, held.response_length AS response_length,
                    held.weight_version_min AS weight_version_min,
                    held.weight_version_max AS weight_version_max)
                FROM (SELECT place, unnest(json_transform(json, $columns)) FROM (
                    SELECT json, row_number() OVER () - 1 AS place
                    FROM read_ndjson_objects([{self.list_files("samples")}], {JSON_OPTIONS}))
                    WHERE place IN (SELECT unnest($places::BIGINT[]))) AS line
                JOIN samples_held AS held ON held.rowid = place)
                JOIN (SELECT unnest($places::BIGINT[]) AS place, unnest(range(len($places))) AS nth)
                USING (place) ORDER BY nth""",
            {"columns": json.dumps(COLUMNS["samples"]), "places": list(places)},
        )

    def list_files(self, kind: str) -> str:
        """The files of a kind as SQL has them; an empty one where there are none."""
        files = find_parts(self.run_dir, kind) or ["/dev/null"]
        return ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)

    def read_curve(
        self, stage: str, name: str, run: str = "", *, smooth: int = 1, log: bool = False
    ) -> Curve:
        """A metric of `totals` by step: its finite values, each the mean of `smooth` up to it; with `log`
        only values above 0.
        """
        found = self.execute(
            f"SELECT step, avg(value) OVER (ORDER BY step, place ROWS {smooth - 1} PRECEDING) AS value"
            f" FROM (SELECT step, rowid AS place, {quote_name(name)} AS value"
            f" FROM {'evaluations' if name.startswith('eval/') else 'metrics'}_held"
            f" WHERE stage = ?) WHERE isfinite(value) AND value > {'0' if log else '-1e999'}"
            " ORDER BY step, place",
            [stage],
        ).fetchnumpy()
        return Curve(stage, name, *map(np.ma.getdata, found.values()), run=run)

    @property
    def attempts(self) -> int:
        """How often the run was started, as far as rows tell."""
        return self.rows(
            "SELECT coalesce(max(attempt), 0) AS found FROM (SELECT attempt FROM stages UNION ALL"
            " SELECT attempt FROM evaluations_held)"
        )[0]["found"]

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of a finished run, empty if there is none. Raises RunDirError if it is damaged."""
        path = self.run_dir.summary
        try:
            return dict(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError) as error:
            raise RunDirError(
                f"{path} is no JSON object ({error}); delete it and run again with --resume"
            ) from error


@contextmanager
def open_record(root: Path, *, points: bool = False) -> Iterator[Record]:
    """The record of the run at `root`, with the tables of POINTS if they are wanted.

    Raises RunDirError if it is not a run directory, or cannot be read.
    """
    run_dir = open_run_dir(root)
    check_links(run_dir)
    with duckdb.connect(":memory:") as connection:
        record = Record(run_dir, connection)
        record.execute(f"{SETTINGS}{CLOSING.format(', '.join(map(record.list_files, COLUMNS)))};{SHOWING}")
        try:
            if points:
                for kind in ("metrics", "evaluations"):
                    record.load(kind)
                record.execute(POINTS)
            yield record
        except duckdb.Error as error:
            raise RunDirError(f"{root}: {str(error).splitlines()[0]}") from error


@contextmanager
def open_records(roots: Sequence[Path]) -> Iterator[dict[str, Record]]:
    """The records of runs with their points, each by its directory's name with as many directories above it
    as tell the runs apart. Raises RunDirError.
    """
    found = {root.resolve(): root for root in reversed(roots)}
    depth = 1
    while len({root.parts[-depth:] for root in found}) < len(found):
        depth += 1
    with ExitStack() as stack:
        yield {
            "/".join(root.parts[-depth:]): stack.enter_context(open_record(found[root], points=True))
            for root in reversed(found)
        }


def find_checkpoints(run_dir: RunDir) -> list[tuple[str, int]]:
    """Stage and step of every complete checkpoint, the oldest first."""
    found = [
        (manifest.stat().st_mtime, manifest.parts[-3], step)
        for manifest in run_dir.checkpoints.glob(str(checkpoint_manifest(Path("*/*"))))
        if (step := parse_step(manifest.parent.name)) is not None
    ]
    return [(stage, step) for _, stage, step in sorted(found)]


def find_parts(run_dir: RunDir, kind: str) -> list[Path]:
    """The files of a kind that are not empty, absolute, in the order in which they were written."""
    return [part for part in list_parts(run_dir.root.absolute() / f"{kind}.jsonl") if part.stat().st_size]


def is_newest(kind: str, table: str) -> str:
    """The SQL condition that a row of a table is of the newest attempt at its step."""
    key = f"stage, step{', name' if kind == 'evaluations' else ''}"
    return f"({key}, attempt) IN (SELECT {key}, max(attempt) FROM {table} GROUP BY ALL)"


def quote_name(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


# --- what the viewers share ---------------------------------------------------------------------------------


ACCURACY = r"^eval/.+/((avg|maj|pass)@\d+|accuracy)$"  # metrics that are shares
# `telling()`: metrics that are shown first, in order; `troubles`: what went wrong in a step, by metric;
# `step_facts`: what a step says of itself, by metric, with its heading (of two with one heading the later
# counts); `describe_step(row)`: the text of each heading, of a row as JSON
DESCRIBING = r"""
    CREATE OR REPLACE MACRO telling() AS [
        'reward/mean', 'loss/total', 'rewards/accuracies', 'rewards/margins', 'loss/nll', 'entropy/mean',
        'response_length/mean', 'truncated/frac', 'trajectories/turns/mean', 'optim/grad_norm', 'kl/ref',
        'mismatch_kl/mean', 'clip_ratio', 'off_policy/mean', 'groups/zero_std_frac',
        'value/explained_variance', 'importance_weight/ess', 'perf/generated_tokens_per_s',
        'perf/trained_tokens_per_s', 'time/step', 'optim/lr'];
    CREATE OR REPLACE TABLE troubles AS FROM (VALUES
        ('optim/skipped_steps', 'optimizer steps changed nothing: not finite, or beyond a limit'),
        ('checkpoint/failed', 'checkpoints could not be saved'),
        ('weight_sync/engines_failed', 'weight updates of an engine failed')) AS known(name, what);
    CREATE OR REPLACE TABLE step_facts AS SELECT *, row_number() OVER () AS number FROM (VALUES
        ('reward/mean', 'reward', '%.3f'), ('loss/total', 'loss', '%.4g'),
        ('optim/grad_norm', 'grad norm', '%.3g'), ('response_length/mean', 'length', '%.1f'),
        ('truncated/frac', 'cut', '%.2f'), ('off_policy/max', 'lag', '%.0f'),
        ('perf/trained_tokens_per_s', 'tok/s', '%.0f'), ('perf/generated_tokens_per_s', 'tok/s', '%.0f'),
        ('time/step', 's/step', '%.2f'), ('entropy/mean', 'entropy', '%.3f'),
        ('clip_ratio', 'clipped', '%.3f'), ('optim/lr', 'lr', '%.2e'),
        ('rewards/margins', 'margin', '%.3f'), ('rewards/accuracies', 'ranked right', '%.2f'),
        ('value/mean', 'value', '%.3f'), ('value/explained_variance', 'explained', '%.2f')
    ) AS known(name, heading, form);
    CREATE OR REPLACE MACRO finite(x) AS if(isfinite(x), x, NULL);
    CREATE OR REPLACE MACRO number_of(row, name) AS
        finite(TRY_CAST(row->>('$."' || name || '"') AS DOUBLE));
    CREATE OR REPLACE MACRO describe_step(row) AS (
        SELECT map_from_entries(list((heading, shown) ORDER BY number))
        FROM (SELECT heading, min(number) AS number,
                arg_max(printf(form, value), number) FILTER (value IS NOT NULL) AS shown
            FROM (SELECT *, number_of(row, name) AS value FROM step_facts) GROUP BY heading))"""
# the columns of samples_held; `segment`: which of its trajectory a last row is; `failure` is the metadata's
# of one that failed
SAMPLE_FACTS = r"""stage, step, attempt, id, group_index, status, reward, tokens, response_length,
    weight_version_min, weight_version_max, policy_version - weight_version_min AS lag,
    CASE WHEN trajectory IS NOT NULL THEN TRY_CAST(regexp_extract(id, '\.(\d+)$', 1) AS INT) END AS segment,
    CASE WHEN status = 'failed' THEN metadata->'$.failure' END AS failure,
    CASE WHEN status = 'failed' THEN id END AS failed_id"""
# segment N of a trajectory, with the id x.N, stands N lines after its first, x
WHOLE = """
    CREATE OR REPLACE TABLE segments AS
    SELECT last, ending, held.* FROM (
        SELECT rowid AS last, id AS ending, unnest(range(greatest(0, last - segment), last + 1)) AS place
        FROM samples_held WHERE segment > 0) AS ends
    JOIN (SELECT rowid AS place, * FROM samples_held) AS held USING (place)
    WHERE starts_with(id || '.', regexp_replace(ending, '[0-9]+$', ''));
    UPDATE samples_held SET tokens = whole.tokens, response_length = whole.length, lag = whole.lag,
        weight_version_min = whole.oldest, weight_version_max = whole.newest
    FROM (SELECT last, sum(tokens) AS tokens, sum(response_length) AS length, max(lag) AS lag,
        min(weight_version_min) AS oldest, max(weight_version_max) AS newest FROM segments GROUP BY last
    ) AS whole WHERE samples_held.rowid = last;
    DELETE FROM samples_held WHERE rowid IN (SELECT place FROM segments WHERE place < last)"""
# `messages`: by class and text, the most frequent first; texts that differ in numbers are one, shown as the
# first was
MESSAGES = r"""
    CREATE OR REPLACE VIEW messages AS
    SELECT class, function, arg_min(text, place) AS text, count(*) AS count, min(step) AS first,
        max(step) AS last, arg_min(failed_id, place) AS sample, arg_min(stage, place) AS stage,
        arg_min(step, place) AS step, min(place) AS place
    FROM (SELECT *, rowid AS place, coalesce(failure->>'$.class', 'unknown') AS class,
            coalesce(failure->>'$.function', '') AS function,
            coalesce(nullif(trim(left(failure->>'$.message', 400)), ''), '(no message)') AS text,
            regexp_replace(text, '0x[0-9a-f]+|\d+(\.\d+)?', '#', 'gi') AS kind
        FROM samples_held WHERE status = 'failed')
    GROUP BY class, function, kind ORDER BY count DESC, place"""
OUTCOMES = """
    SELECT stages.stage, stages.last AS ">steps",
        printf('%.1f', sum(total) FILTER (name = 'time/step') / 60) AS ">minutes",
        coalesce(any_value(brief(totals.first) || ' → ' || brief(totals.last))
            FILTER (name = 'reward/mean'), '') AS ">reward first → last",
        coalesce(any_value(brief(totals.first) || ' → ' || brief(totals.last))
            FILTER (name = 'loss/total'), '') AS ">loss first → last",
        (sum(total) FILTER (name LIKE 'groups/dropped/%'))::BIGINT AS ">groups dropped",
        (sum(total) FILTER (name LIKE 'fail/%'))::BIGINT AS ">samples failed"
    FROM stages LEFT JOIN totals USING (stage) GROUP BY ALL ORDER BY min(stages.rowid)"""
DROPPED = """
    SELECT 'groups that were not trained' AS title, name[16:] AS reason, sum(total)::BIGINT AS ">groups",
        percent(sum(total), (SELECT sum(total) FROM totals WHERE name = 'groups/drawn')) AS ">of those drawn"
    FROM totals WHERE name LIKE 'groups/dropped/%' GROUP BY name HAVING sum(total) > 0
    ORDER BY sum(total) DESC"""
TROUBLE = """
    SELECT what, sum(total) AS total FROM totals JOIN troubles USING (name)
    GROUP BY what HAVING sum(total) > 0 ORDER BY min(troubles.rowid)"""


def load_facts(record: Record, more: str = "") -> None:
    """Loads samples_held, with `more` columns, and makes the tables, macros and views of this page."""
    record.load_samples(more)
    record.execute(f"{DESCRIBING};{MESSAGES}")


def count_of(number: int, thing: str) -> str:
    """`1 attempt`, `2 attempts`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def read_settings(run_dir: RunDir) -> dict[str, str]:
    """Each setting of config.toml as text by its dotted name, secrets hidden; none if it is missing.

    Raises RunDirError for what is no TOML.
    """
    try:
        table = tomllib.loads(run_dir.config.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunDirError(f"{run_dir.config} is not TOML ({error}); restore the file") from error
    return flatten_settings(remove_secrets("", table))
