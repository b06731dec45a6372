"""SQL over a run's rows: duckdb reads the .jsonl parts, and nothing else.

    SQL ──► which views it names ──► their columns, found in the files ──► views over read_json ──► locked ──► the answer

Once the views are there duckdb may open these files only, load no extension and change no setting; one
statement that reads is run.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from rollouts.config.spelling import nearest
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.read import open_run_dir
from rollouts.inspect.terminal import make_safe
from rollouts.metrics.jsonl import has_place, parse_row
from rollouts.run_dir import check_links, list_parts

if TYPE_CHECKING:
    import duckdb

VIEWS = ("metrics", "evaluations", "samples", "contributions", "spans")
KEPT_TYPES = (
    "BIGINT",
    "UBIGINT",
    "HUGEINT",
    "DOUBLE",
    "BOOLEAN",
    "VARCHAR",
    "JSON",
)  # of a column; what looks like a date is text that looks so
HEAD_TYPES = {
    "stage": "VARCHAR",
    "step": "BIGINT",
    "attempt": "BIGINT",
}  # of the columns by which the newest attempt is found
SHOWN_NAMES = 4  # of columns that an error lists
SHOWN_ROWS = 200  # of a table
SHOWN_CHARACTERS = 200  # of a cell of a table
LONGEST_ROW = 1 << 28  # bytes of a line
MISSING_COLUMN = re.compile(
    r'Referenced column "([^"]+)" (?:was )?not found|does not have a column named "([^"]+)"'
)
MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a statement answered."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...]  # for a person: lines that were left out


def query_run(root: Path, sql: str) -> Answer:
    """The answer to one SQL statement that reads, over the views of the run at `root`. Changes nothing on
    disk.

    Raises ConfigError if duckdb is not installed, or for SQL that is wrong or does more than read;
    RunDirError where `root` is no run directory, has no rows of a kind that the statement names, or a line
    among them that is damaged.
    """
    duck = load_duckdb()
    run_dir = open_run_dir(root)
    check_links(run_dir)
    connection = duck.connect(":memory:")
    try:
        check_statement(duck, connection, sql)
        columns: dict[str, list[str]] = {}
        notes: list[str] = []
        files: list[Path] = []
        for name in find_views(sql):
            parts = [part for part in list_parts(root.absolute() / f"{name}.jsonl") if part.stat().st_size]
            if not parts:
                raise RunDirError(
                    f"{root} has no {name}.jsonl with rows: nothing was logged there; the views are"
                    f" {', '.join(VIEWS)}"
                )
            columns[name] = make_view(duck, connection, name, parts)
            notes += check_lines(connection, name, parts)
            files += parts
        lock(connection, files)
        try:
            connection.execute(sql)
        except duck.Error as error:
            raise explain_error(error, columns) from error
        head = tuple(str(column[0]) for column in connection.description or ())
        return Answer(head, tuple(connection.fetchall()), tuple(notes))
    finally:
        connection.close()


def load_duckdb() -> ModuleType:
    """Raises ConfigError, with the command that installs it."""
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(
            "query needs duckdb, which is not installed; install it with: pip install 'rollouts-rl[query]'"
        ) from error
    return duckdb


def check_statement(duck: Any, connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raises ConfigError for what is not one statement that reads."""
    try:
        statements = connection.extract_statements(sql)
    except duck.Error as error:
        raise ConfigError(
            f"SQL: {first_line(error)}; a column with a slash in its name stands in double quotes"
        ) from error
    # no EXPLAIN: with ANALYZE it runs what it explains, and that may be a COPY onto the record
    if len(statements) != 1 or statements[0].type != duck.StatementType.SELECT:
        kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
        raise ConfigError(
            f"SQL: {kinds}; give one statement that reads, SELECT … FROM metrics for example: the record is"
            " not changed from here"
        )


def find_views(sql: str) -> list[str]:
    """The views that the statement may mean: those whose name, or name_all, is a word in it."""
    words = set(re.findall(r"\w+", sql.lower()))
    return [name for name in VIEWS if {name, f"{name}_all"} & words]


def make_view(
    duck: Any, connection: duckdb.DuckDBPyConnection, name: str, parts: Sequence[Path]
) -> list[str]:
    """Makes NAME_all over the parts and NAME over its newest attempts; the columns. Raises RunDirError for
    files that are not rows.
    """
    files = ", ".join(quote_text(str(part)) for part in parts)
    options = (
        f"[{files}], format = 'newline_delimited', ignore_errors = true, maximum_object_size = {LONGEST_ROW}"
    )
    try:
        source = f"read_json({options}, sample_size = -1, maximum_depth = 2, union_by_name = true)"
        found = connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    except duck.Error as error:
        raise RunDirError(f"{parts[0]}: {first_line(error)}") from error
    types = {str(row[0]): str(row[1]) if str(row[1]) in KEPT_TYPES else "VARCHAR" for row in found}
    if any(types.get(column) != kind for column, kind in HEAD_TYPES.items()):
        find_damage(parts)
    types |= HEAD_TYPES
    declared = ", ".join(f"{quote_name(column)}: {quote_text(kind)}" for column, kind in types.items())
    connection.execute(
        f"CREATE VIEW {name}_lines AS SELECT * FROM read_json({options}, columns = {{{declared}}})"
    )
    head = "stage IS NOT NULL AND step IS NOT NULL AND attempt IS NOT NULL"
    connection.execute(f"CREATE VIEW {name}_all AS SELECT * FROM {name}_lines WHERE {head}")
    key = "stage, step, name" if name == "evaluations" and "name" in types else "stage, step"
    newest = f"SELECT * FROM {name}_all QUALIFY attempt = max(attempt) OVER (PARTITION BY {key})"
    connection.execute(f"CREATE VIEW {name} AS {newest}")
    return list(types)


def lock(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> None:
    """From here on the connection opens these files only, and nothing of that can be taken back."""
    connection.execute("SET autoinstall_known_extensions = false")
    connection.execute("SET autoload_known_extensions = false")
    connection.execute("SET temp_directory = ''")
    connection.execute(f"SET allowed_paths = [{', '.join(quote_text(str(path)) for path in files)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def check_lines(connection: duckdb.DuckDBPyConnection, name: str, parts: Sequence[Path]) -> list[str]:
    """What a person should know of lines that no row of the view NAME_all is of: a torn last one, or rows
    that only duckdb cannot read.

    Raises RunDirError naming the first line that is damaged or that rollouts did not write, as all readers
    do.
    """
    torn = describe_torn(parts[-1])
    rows = connection.execute(
        f"SELECT count(*) FROM {name}_lines WHERE stage IS NULL OR step IS NULL OR attempt IS NULL"
    ).fetchone()
    left_out = int(rows[0]) - len(torn) if rows else 0
    if left_out <= 0:
        return torn
    first = find_damage(parts)
    # none: a line was torn when duckdb saw it, and has been ended since
    return (
        [
            *torn,
            (
                f"{left_out} rows of {name} are left out: duckdb takes no half of a character in a text; the"
                f" first is {first}"
            ),
        ]
        if first
        else torn
    )


def find_damage(parts: Sequence[Path]) -> str:
    """Where the first line is that strict readers of JSON refuse and ours take, "" if there is none.

    Raises RunDirError naming the first line that is damaged or that rollouts did not write.
    """
    first = ""
    for part in parts:
        for number, line, whole in iterate_lines(part):
            row = parse_row(line)
            if not whole and row is None and part is parts[-1]:
                continue
            if row is None:
                raise RunDirError(
                    f"{part}:{number} is not a JSON object ({line[:40]!r}…); the file is damaged: restore it,"
                    " or delete that line"
                )
            if not (isinstance(row.get("stage"), str) and has_place(row)):
                raise RunDirError(
                    f"{part}:{number} has no text 'stage' and whole 'step' and 'attempt'; rollouts did not"
                    " write it"
                )
            first = first or ("" if is_text(line) else f"{part}:{number}")
    return first


def iterate_lines(part: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Number, text and whether it has its newline of each line that is not empty."""
    with part.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.rstrip(b"\n"), line.endswith(b"\n")


def is_text(line: bytes) -> bool:
    """Whether strict readers of JSON take the line."""
    try:
        msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def describe_torn(part: Path) -> list[str]:
    """A sentence if what follows the last newline of the file is no row."""
    with part.open("rb") as file:
        end = file.seek(0, io.SEEK_END)
        tail = b""
        while end > 0 and b"\n" not in tail:
            begin = max(0, end - (1 << 16))
            file.seek(begin)
            tail, end = file.read(end - begin) + tail, begin
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn or parse_row(torn) is not None:
        return []
    return [
        (
            f"{part}: the last line is torn ({len(torn)} bytes) and left out; its writer was killed, or is"
            " writing it"
        )
    ]


def explain_error(error: Exception, columns: dict[str, list[str]]) -> ConfigError:
    """What to say of a statement that duckdb refuses: with the nearest column or view where one is missing."""
    text = first_line(error)
    if match := MISSING_TABLE.search(text):
        return ConfigError(
            f"SQL: there is no view {match[1]}; the views are {', '.join(VIEWS)}, and each with _all for"
            " every attempt"
        )
    match = MISSING_COLUMN.search(text)
    if match is None:
        return ConfigError(f"SQL: {text}")
    name = match[1] or match[2]
    names = list(dict.fromkeys(column for held in columns.values() for column in held))
    parts = [
        f'"{column}"' for column in names if column.startswith(f"{name}/") or column.endswith(f"/{name}")
    ]
    if parts:
        return ConfigError(
            f"SQL: there is no column {name}; a name with a slash stands in double quotes:"
            f" {', '.join(parts[:SHOWN_NAMES])}"
        )
    near = nearest(name, names)
    hint = f'did you mean "{near}"?' if near else f"the columns are {', '.join(names)}"
    return ConfigError(f"SQL: there is no column {name}; {hint}")


def first_line(error: Exception) -> str:
    """Of its message, without the kind of error before it."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"^\w+ Error: ", "", line)


def quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# --- what is printed ----------------------------------------------------------------------------------------


def make_answer_table(answer: Answer) -> Table:
    """The first SHOWN_ROWS rows."""
    left = len(answer.rows) - SHOWN_ROWS
    count = "1 row" if len(answer.rows) == 1 else f"{len(answer.rows)} rows"
    caption = f"{count}, {left} of them not shown: --csv and --json print all" if left > 0 else count
    table = Table(caption=caption, caption_justify="left")
    first = answer.rows[0] if answer.rows else ()
    for place, column in enumerate(answer.columns):
        is_number = place < len(first) and isinstance(first[place], int | float)
        table.add_column(
            make_safe(column, one_line=True), justify="right" if is_number else "left", overflow="fold"
        )
    for row in answer.rows[:SHOWN_ROWS]:
        table.add_row(*(format_cell(value) for value in row))
    return table


def format_cell(value: Any) -> str:
    """A value on one line; what would steer a terminal is written out."""
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    shown = make_safe(text[:SHOWN_CHARACTERS], one_line=True)
    return f"{shown}…" if len(text) > SHOWN_CHARACTERS else shown


def format_answer_csv(answer: Answer) -> str:
    """All rows, after a line with the columns."""
    held = io.StringIO()
    writer = csv.writer(held, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows(answer.rows)
    return held.getvalue()


def format_answer_json(answer: Answer) -> str:
    """A line for each row."""
    return "".join(_encode_rows(answer))


def _encode_rows(answer: Answer) -> Iterator[str]:
    for row in answer.rows:
        yield msgspec.json.encode(dict(zip(answer.columns, row, strict=True)), enc_hook=str).decode() + "\n"
