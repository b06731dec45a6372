"""The command `query`: one SQL statement that reads, over the views of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import duckdb
from rich.table import Table

from rollouts.errors import ConfigError
from rollouts.inspect.facts import count_of
from rollouts.inspect.record import KINDS, Record
from rollouts.inspect.terminal import make_safe, make_table

SHOWN_ROWS = 200  # of a table
SHOWN_CHARACTERS = 200  # of a cell of a table


class Answer(NamedTuple):
    """What a statement answered."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


def run_sql(record: Record, sql: str) -> Answer:
    """The answer to a statement. Raises ConfigError for SQL that is wrong or does more than read."""
    try:
        statements = record.connection.extract_statements(sql)
        # no EXPLAIN: with ANALYZE it runs what it explains, and that may be a COPY onto the record
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise ConfigError("SQL: give one statement that reads, for example SELECT … FROM metrics")
        for kind in (kind for kind in KINDS if kind in sql.lower()):
            record.add_views(kind)
            record.note_damage(kind, f"{kind}_lines")
        result = record.connection.execute(sql)
        return Answer(tuple(str(column[0]) for column in result.description or ()), result.fetchall())
    except duckdb.Error as error:
        text = " ".join(str(error).partition("\n\nLINE")[0].split())
        raise ConfigError(
            f"SQL: {text}; the views are {', '.join(KINDS)}, each with _all for every attempt, and a name"
            ' with a slash stands in double quotes: "reward/mean"'
        ) from error


def make_answer_table(answer: Answer) -> Table:
    """The first SHOWN_ROWS rows."""
    headings = [make_safe(column, one_line=True) for column in answer.columns]
    for place, value in enumerate(answer.rows[0] if answer.rows else ()):
        headings[place] = f"{'>' * isinstance(value, int | float)}{headings[place]}"
    table = make_table("", headings, (list(map(format_cell, row)) for row in answer.rows[:SHOWN_ROWS]))
    left_out = max(0, len(answer.rows) - SHOWN_ROWS)
    more = f", {left_out} of them not shown: --csv and --json print all" if left_out else ""
    table.caption, table.caption_justify = count_of(len(answer.rows), "row") + more, "left"
    return table


def format_cell(value: Any) -> str:
    """A value on one line; what would steer a terminal is written out."""
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    shown = make_safe(text[:SHOWN_CHARACTERS], one_line=True)
    return f"{shown}…" if len(text) > SHOWN_CHARACTERS else shown
