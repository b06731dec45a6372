"""SQL over a run's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.query import format_cell, query_run
from rollouts.inspect.read import read_run

pytest.importorskip("duckdb")


def write_rows(path: Path, *rows: dict) -> None:
    head = {"schema": 1, "stage": "rl", "step": 1, "policy_version": 0, "attempt": 1, "time_unix": 1.0}
    path.write_text("".join(json.dumps({**head, **row}) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "it's a run"
    root.mkdir()
    write_rows(root / "metrics.jsonl", {"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5})
    write_rows(root / "metrics.1.jsonl", {"step": 2, "attempt": 2, "reward/mean": 0.75, "fail/reward": 1})
    write_rows(
        root / "samples.jsonl",
        {"id": "a", "response": "2026-01-02", "metadata": {"k": [1]}},
        {"id": "b", "response": "2026-01-03"},
    )
    return root


def test_views_hold_the_newest_attempt_and_all_views_every_one(run: Path):
    sql = 'SELECT step, attempt, "reward/mean" FROM {} ORDER BY step, attempt'
    assert query_run(run, sql.format("metrics")).rows == ((1, 1, 0.25), (2, 2, 0.75))
    assert query_run(run, sql.format("metrics_all")).rows == ((1, 1, 0.25), (2, 1, 0.5), (2, 2, 0.75))


def test_text_stays_text_and_objects_are_json(run: Path):
    answer = query_run(run, "SELECT response, metadata->>'$.k[0]' AS k FROM samples ORDER BY id")
    assert answer.columns == ("response", "k")
    assert answer.rows == (("2026-01-02", "1"), ("2026-01-03", None))


def test_an_evaluation_is_newest_by_its_name(run: Path):
    write_rows(run / "evaluations.jsonl", {"name": "heldout", "attempt": 1}, {"name": "pairs", "attempt": 2})
    assert query_run(run, "SELECT name FROM evaluations ORDER BY name").rows == (("heldout",), ("pairs",))


def test_a_torn_last_line_is_left_out_and_said(run: Path):
    with (run / "metrics.1.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    answer = query_run(run, "SELECT count(*) FROM metrics_all")
    assert answer.rows == ((3,),)
    assert "the last line is torn (19 bytes)" in answer.notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"stage": "rl", "st', r"metrics\.jsonl:2 is not a JSON object"),
        (b"\x00\x00\x00", r"metrics\.jsonl:2 is not a JSON object"),
        (b'{"stage":"rl","step":7,"attempt":1}{"stage":"rl"}', r"metrics\.jsonl:2 is not a JSON object"),
        (b"[1]", r"metrics\.jsonl:2 is not a JSON object"),
        (
            b'{"stage":"rl","step":7,"attempt":1,"reward/mean":"\xff"}',
            r"metrics\.jsonl:2 is not a JSON object",
        ),
        (
            b'{"stage":"rl","step":"seven","attempt":1}',
            r"metrics\.jsonl:2 has no text 'stage' and whole 'step'",
        ),
        (b'{"reward/mean": 7}', r"metrics\.jsonl:2 has no text 'stage' and whole 'step'"),
    ],
)
def test_a_damaged_line_in_the_middle_is_refused_as_by_inspect(run: Path, line: bytes, message: str):
    path = run / "metrics.jsonl"
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, second, b""]))
    with pytest.raises(RunDirError, match=message):
        query_run(run, "SELECT count(*) FROM metrics")
    with pytest.raises(RunDirError, match=message):
        read_run(run)


def test_a_torn_line_before_another_part_is_refused(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    with pytest.raises(RunDirError, match=r"metrics\.jsonl:3 is not a JSON object"):
        query_run(run, "SELECT count(*) FROM metrics")


def test_rows_that_only_duckdb_does_not_take_are_counted_with_the_first(run: Path):
    write_rows(
        run / "samples.jsonl",
        {"id": "a"},
        {"id": "b", "response": "\ud800"},
        {"id": "c", "response": "\udfff"},
    )
    answer = query_run(run, "SELECT id FROM samples")
    assert answer.rows == (("a",),)
    assert answer.notes == (
        (
            "2 rows of samples are left out: duckdb takes no half of a character in a text; the first is"
            f" {run}/samples.jsonl:2"
        ),
    )


def test_a_column_that_is_not_there_names_the_nearest(run: Path):
    with pytest.raises(ConfigError, match=r'no column reward/maen; did you mean "reward/mean"\?'):
        query_run(run, 'SELECT "reward/maen" FROM metrics')
    with pytest.raises(ConfigError, match=r'stands in double quotes: "reward/mean"'):
        query_run(run, "SELECT reward/mean FROM metrics")
    with pytest.raises(ConfigError, match="there is no view metrix; the views are metrics"):
        query_run(run, "SELECT * FROM metrix")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_text('config.toml')",
        "COPY (SELECT 1) TO 'out.csv'",
        "CREATE TABLE t (a int)",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "ATTACH 'x.db'",
        "SELECT 1; SELECT 2",
        "",
    ],
)
def test_only_the_rows_are_read_and_nothing_is_written(run: Path, sql: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run)
    (run / "config.toml").write_text("secret")
    before = sorted(run.iterdir())
    with pytest.raises(ConfigError, match=r"^SQL: "):
        query_run(run, sql)
    assert sorted(run.iterdir()) == before


def test_a_link_out_of_the_run_is_not_followed(run: Path, tmp_path: Path):
    write_rows(tmp_path / "other.jsonl", {"a": 1})
    (run / "spans.jsonl").symlink_to(tmp_path / "other.jsonl")
    with pytest.raises(RunDirError, match="outside"):
        query_run(run, "SELECT * FROM spans")


def test_rows_that_were_not_logged_are_said(run: Path):
    with pytest.raises(RunDirError, match=r"has no contributions\.jsonl with rows"):
        query_run(run, "SELECT * FROM contributions")


def test_the_command_prints_a_table_csv_or_json(run: Path, capsys: pytest.CaptureFixture[str]):
    sql = 'SELECT step, "reward/mean" FROM metrics ORDER BY step'
    assert main(["query", str(run), sql, "--csv"]) == 0
    assert capsys.readouterr().out == "step,reward/mean\n1,0.25\n2,0.75\n"
    assert main(["query", str(run), sql, "--json"]) == 0
    assert capsys.readouterr().out == '{"step":1,"reward/mean":0.25}\n{"step":2,"reward/mean":0.75}\n'
    assert main(["query", str(run), sql]) == 0
    out = capsys.readouterr().out
    assert "│    2 │        0.75 │" in out
    assert "2 rows" in out


def test_a_cell_cannot_steer_a_terminal():
    assert format_cell("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"
    assert format_cell(None) == ""
    assert len(format_cell("x" * 1000)) == 201


def test_an_explained_copy_is_refused_and_the_record_stays(run: Path):
    path = run / "metrics.jsonl"
    before = path.read_bytes()
    target = str(path.resolve()).replace("'", "''")
    with pytest.raises(ConfigError, match="EXPLAIN; give one statement that reads"):
        query_run(
            run, f"EXPLAIN ANALYZE COPY (SELECT 1 AS metrics) TO '{target}' (FORMAT csv, USE_TMP_FILE false)"
        )
    assert path.read_bytes() == before
