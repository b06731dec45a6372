"""What `inspect`, `plot` and `query` say of a run, and how its files are read."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.cli import main
from rollouts.errors import ConfigError, RunDirError
from rollouts.inspect.commands import format_cell, run_sql
from rollouts.inspect.overview import draw_chart
from rollouts.inspect.record import Curve, open_record
from rollouts.metrics.jsonl import newest_attempts, read_rows
from tests.support.text_tables import cases
from tests.unit.run_rows import read_command, write_rows, write_run

DAMAGED = (
    rb"""no json
5
[1]
{"stage": "rl", "st{"stage": "rl"}
{}
"""
    b'\x00\x00\n{"a": "\xff"}\n'
)


# --- reading ------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "stage": st.sampled_from(["sft", "rl"]),
                "step": st.integers(1, 3),
                "attempt": st.integers(1, 3),
            },
            optional={"a/b": st.floats(-1, 1)},
        ),
        min_size=2,
    ),
    cut=st.integers(1, 100),
)
def test_views_hold_the_newest_attempt_as_a_slow_reader_finds_it(rows, cut, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    write_rows(root / "metrics.jsonl", *rows[: cut % len(rows)], {"a/b": 1.0, "stage": "rl"})
    write_rows(root / "metrics.1.jsonl", *rows[cut % len(rows) :])
    expected = newest_attempts(read_rows(root / "metrics.jsonl"))
    with open_record(root, points=True) as record:
        assert sorted(record.rows("FROM metrics"), key=str) == sorted(expected, key=str)
        assert {stage["stage"]: stage["rows"] for stage in record.rows("FROM stages")} == Counter(
            row["stage"] for row in expected
        )
        for stage in {row["stage"] for row in expected}:
            rows_of = [row for row in expected if row["stage"] == stage and "a/b" in row]
            own = [(row["step"], row["a/b"]) for row in sorted(rows_of, key=lambda row: row["step"])]
            curve = record.read_curve(stage, "a/b")
            assert list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) == own


def test_damaged_lines_are_counted_and_said_and_a_torn_one_apart(tmp_path):
    path = write_rows(
        tmp_path / "metrics.jsonl", {"a/b": 1.0}, {"step": 2, "a/b": "text"}, {"step": 3, "a/b": 3}
    )
    path.write_bytes(path.read_bytes() + DAMAGED + b'{"stage": "rl", "step": 4, "atte')
    with open_record(tmp_path, points=True) as record:
        curve = record.read_curve("rl", "a/b")
        assert (curve.steps.tolist(), curve.values.tolist()) == ([1, 3], [1.0, 3.0])  # a text is no value
        assert record.notes == [
            "metrics.jsonl: the torn last line (32 bytes) is left out",
            "metrics.jsonl: 7 damaged lines left out",
        ]


def test_names_that_differ_in_case_and_odd_names_are_read(tmp_path):
    odd = {"a'b/\"c": 1.0, "loss/A": 2.0, "loss/a": 3.0, "Step": 4, "": 5.0}
    root = write_rows(tmp_path / "it's [a] *run/metrics.jsonl", odd).parent
    with open_record(root, points=True) as record:
        for name in ("a'b/\"c", "loss/A"):
            assert record.read_curve("rl", name).values.tolist() == [odd[name]]


def test_what_is_no_run_and_what_leads_out_of_it_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="not a run directory"), open_record(tmp_path):
        pass
    write_rows(tmp_path / "run/metrics.jsonl", {})
    (tmp_path / "run/spans.jsonl").symlink_to(write_rows(tmp_path / "other.jsonl", {}))
    with pytest.raises(RunDirError, match="outside"), open_record(tmp_path / "run"):
        pass


# --- inspect ------------------------------------------------------------------------------------------------


def test_inspect_prints_every_part_and_ends_with_the_picture(tmp_path, capsys):
    root = write_run(tmp_path / "run", fail__reward=1.0, groups__drawn=8.0, groups__dropped__zero_std=2.0)
    evaluation = {"name": "heldout", "eval/heldout/avg@1": 0.25, "eval/heldout/failed": 1}
    again = {**evaluation, "attempt": 2, "eval/heldout/avg@1": 0.5}
    write_rows(root / "evaluations.jsonl", evaluation, again)
    samples = [{"id": "s", "policy_version": 9, "weight_version_min": oldest} for oldest in (9, 8, 8, 0)]
    failure = {"class": "reward", "function": "grade", "message": "timed\nout"}
    failed = {"id": "f", "status": "failed", "metadata": {"failure": failure}}
    write_rows(root / "samples.jsonl", *({**row, "weight_version_max": 9} for row in samples), failed)
    text = " ".join(read_command(capsys, "inspect", root, "--last", "2").split())
    wanted = f"""
rl reward
reward/mean  ▁▁▁▂▂▃▃▃▄▄▅▅▆▆▆▇▇███   0.05     1  0.05    1
last 2 steps
│ rl    │   20 │  1.000 │ 0.05 │   2.00 │
│ rl    │    1 │       0 │ heldout │  50.0 % │      1 │
generate  1.5     75.0 %
rest of the step     0.5     25.0 %
8 or more         1  25.0 %
staleness of 4 logged samples, 75.0 % with tokens of more than one version
│ zero_std │ 40 │ 25.0 % │
│ reward │ 20 │ 20 │ grade: timed out │
{root}: finished, 2 attempts, no checkpoint
0.05 → 1
mode rl, accuracy.base 0.0, accuracy.rl 0.5
wrote {root / "curves.png"}"""
    for line in wanted.strip().splitlines():
        assert " ".join(line.split()) in text, line
    assert f"{root / 'curves.png'} is up to date" in read_command(capsys, "inspect", root)


@cases("width: 40 80 200")
def test_inspect_fits_the_terminal(width: int, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rollouts.inspect.commands.PLAIN_WIDTH", width)
    root = write_run(tmp_path / "run", optim__lr=1e-3, entropy__mean=1.0)
    lines = read_command(capsys, "inspect", root, "--last", "3").splitlines()
    tables = [line for line in lines if line and not line.startswith(("mode ", str(tmp_path), "wrote "))]
    assert max(map(len, tables)) <= width
    assert any("more columns in a" in line for line in lines) == (width == 40)


def test_a_run_without_rows_says_so(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")
    assert "not finished, 0 attempts, no checkpoint" in read_command(capsys, "inspect", tmp_path)
    (tmp_path / "summary.json").write_text("[1]")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "summary.json is no JSON object" in capsys.readouterr().err


def test_runs_are_compared_at_equal_steps(tmp_path, capsys):
    first, second = write_run(tmp_path / "a/x", reward__std=1.0), write_run(tmp_path / "b/x")
    (second / "config.toml").write_text("seed = 1\n")
    write_rows(second / "metrics.jsonl", *({"step": step, "reward/mean": 1.0} for step in range(1, 11)))
    text = " ".join(read_command(capsys, "inspect", first, second).split())
    assert "rl, step 10" in text
    assert "│ reward/mean │ 0.5 │ 1 (+0.5) │" in text
    assert "│ seed │ 0 │ 1 │" in text
    assert "a/x ┃ b/x" in text
    assert main(["inspect", str(first), str(second), "--png", "x.png"]) == 2


# --- curves -------------------------------------------------------------------------------------------------


def test_curves_of_a_line_have_no_gaps():
    text = draw_chart([Curve("rl", "x", np.array([1, 2]), np.array([0.0, 1.0]))], width=4, height=2).plain
    assert text == "   rl x\n1 ┤⠀⠀⡠⠊\n0 ┤⡠⠊⠀⠀\n   1step 2"


def test_a_curve_is_smoothed_by_means_up_to_each_value(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", *({"step": step, "x/y": of} for step, of in enumerate((1, 2, -6))))
    with open_record(tmp_path, points=True) as record:
        assert record.read_curve("rl", "x/y", smooth=2).values.tolist() == [1.0, 1.5, -2.0]
        assert record.read_curve("rl", "x/y", log=True).values.tolist() == [1.0, 2.0]
        assert record.rows("SELECT sparkline([0.0, 1, 2]) AS a, sparkline([1, NULL, 1]) AS b") == [
            {"a": "▁▅█", "b": "▅ ▅"}
        ]


def test_plot_chooses_metrics_by_pattern_and_stacks_runs_without_colours(tmp_path, capsys):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    write_rows(first / "evaluations.jsonl", {"name": "h", "eval/h/avg@1": 0.5})
    lines = read_command(capsys, "plot", first, second, "reward/*", "eval/*", "--smooth", "2").splitlines()
    assert [line.strip() for line in lines if line.startswith("  ") and "/" in line] == [
        *["rl reward/mean"] * 2,
        "rl eval/h/avg@1",
    ]
    assert main(["plot", str(first), "loss/total", "--log", "--png", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@cases("""
words       | message
reward/maen | near are reward/mean
rewards/* | near are reward/mean
reward/mean --stage sft | the stages are rl
reward/mean --smooth 0 | at least 1
/ | name at least one metric
reward/mean --png /nowhere/x.png | cannot be written
""")
def test_plot_says_what_is_wrong(words, message, tmp_path, capsys):
    assert main(["plot", str(write_run(tmp_path / "run")), *words.split()]) == 2
    assert message in capsys.readouterr().err


# --- query --------------------------------------------------------------------------------------------------


@pytest.fixture
def queried(tmp_path):
    root = tmp_path / "it's a run"
    write_rows(root / "metrics.jsonl", {"reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5})
    write_rows(root / "metrics.1.jsonl", {"step": 2, "attempt": 2, "reward/mean": 0.75, "fail/reward": 1})
    write_rows(root / "samples.jsonl", {"id": "a", "response": "2026-01-02", "metadata": {"k": [1]}})
    write_rows(
        root / "evaluations.jsonl",
        {"name": "one", "eval/a": 0.1},
        {"name": "two", "eval/a": 0.2, "attempt": 2},
    )
    return root


@cases("""
sql                                                    | rows
SELECT step, "reward/mean" FROM metrics ORDER BY step  | [[1, 0.25], [2, 0.75]]
SELECT count(*) FROM metrics_all                       | [[3]]
SELECT response, metadata->>'$.k[0]' FROM samples      | [["2026-01-02", "1"]]
SELECT name FROM evaluations ORDER BY name             | [["one"], ["two"]]
SELECT count(*), count(track) FROM spans               | [[0, 0]]
""")
def test_views_answer(queried, sql, rows: Any):
    with open_record(queried) as record:
        assert [*map(list, run_sql(record, sql)[1])] == rows


@cases(r"""
sql                               | message
SELECT "reward/maen" FROM metrics | "reward/maen" not found in FROM clause! Candidate bindings: "reward/mean"
SELECT reward/mean FROM metrics | stands in double quotes: "reward/mean"
SELECT * FROM metrix | the views are metrics
SELECT * FROM read_text('/etc/hostname') |
SELECT * FROM glob('/etc/*') |
SELECT * FROM read_text('config.toml') |
COPY (SELECT 1) TO 'metrics.jsonl' (USE_TMP_FILE false) | one statement that reads
EXPLAIN ANALYZE COPY (SELECT 1) TO 'metrics.jsonl' | one statement that reads
CREATE TABLE t (a int) | one statement that reads
SET enable_external_access = true | one statement that reads
INSTALL httpfs |
ATTACH 'x.db' |
SELECT 1; SELECT 2 | one statement that reads
 | one statement that reads
""")
def test_a_query_reads_the_rows_and_nothing_else(queried, sql, message, monkeypatch):
    monkeypatch.chdir(queried)
    (queried / "config.toml").write_text("secret")
    before = {path: path.read_bytes() for path in queried.iterdir()}
    with pytest.raises(ConfigError, match=f"^SQL: .*{message}"), open_record(queried) as record:
        run_sql(record, sql)
    assert {path: path.read_bytes() for path in queried.iterdir()} == before


def test_query_prints_a_table_csv_or_json(queried, capsys):
    sql = 'SELECT step, "reward/mean" FROM metrics ORDER BY step'
    with (queried / "metrics.1.jsonl").open("a") as file:
        file.write('{"stage": "r')
    assert main(["query", str(queried), sql, "--csv"]) == 0
    written = capsys.readouterr()
    assert written.out == "step,reward/mean\n1,0.25\n2,0.75\n"
    assert "the torn last line (12 bytes) is left out" in written.err
    lines = read_command(capsys, "query", queried, sql, "--json").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "│    2 │        0.75 │" in read_command(capsys, "query", queried, sql)
    assert format_cell("a\x1b[2J\n" + "x" * 300) == ("a\\x1b[2J\\n" + "x" * 300)[:204] + "…"
