from __future__ import annotations

import fcntl
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.viewer import METRICS, write_run
from rollouts.errors import RunDirError
from rollouts.inspect import columns as columns_module
from rollouts.inspect.columns import Columns, find_newest, open_columns
from rollouts.inspect.read import read_run, series
from rollouts.metrics.jsonl import newest_attempts, read_rows
from rollouts.run_dir import RunDir


def metric_row(step: int, attempt: int = 1, **metrics: Any) -> dict[str, Any]:
    head = {
        "schema": 1,
        "stage": "rl",
        "step": step,
        "policy_version": step - 1,
        "attempt": attempt,
        "time_unix": 1.5,
    }
    return head | {name.replace("__", "/"): value for name, value in metrics.items()}


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def open_indexed(root: Path, name: str = "metrics") -> Columns:
    """Every whole line goes into the index, however few there are."""
    return open_columns(RunDir(root), name, keep_bytes=0)


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every stretch of lines that is decoded from now on."""
    decoded: list[int] = []
    real = columns_module.decode_lines

    def decode(layout: Any, lines: bytes, **more: Any) -> Any:
        decoded.append(len(lines))
        return real(layout, lines, **more)

    monkeypatch.setattr(columns_module, "decode_lines", decode)
    return decoded


# --- columns ------------------------------------------------------------------------------------------------


def test_a_column_has_a_number_for_each_row_and_nan_where_a_row_has_none(tmp_path: Path):
    append_rows(
        tmp_path / "metrics.jsonl",
        [metric_row(1, a__b=0.5), metric_row(2, c__d=3), metric_row(3, a__b=-1.0, c__d=4)],
    )
    for columns in (
        open_columns(RunDir(tmp_path), "metrics"),
        open_indexed(tmp_path),
        open_indexed(tmp_path),
    ):
        assert columns.metrics == ("a/b", "c/d")
        np.testing.assert_array_equal(columns.column("a/b"), [0.5, math.nan, -1.0])
        np.testing.assert_array_equal(columns.column("c/d"), [math.nan, 3.0, 4.0])
        np.testing.assert_array_equal(columns.column("step"), [1, 2, 3])
        assert [columns.texts("stage")[code] for code in columns.column("stage")] == ["rl"] * 3
        assert columns.notes == ()
        with pytest.raises(KeyError):
            columns.column("e/f")


def test_a_small_run_leaves_no_index_behind(tmp_path: Path):
    append_rows(tmp_path / "metrics.jsonl", [metric_row(1)])
    open_columns(RunDir(tmp_path), "metrics")
    assert not (tmp_path / "index").exists()


def test_of_a_run_that_goes_on_only_new_lines_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    append_rows(tmp_path / "metrics.jsonl", [metric_row(step, a__b=step) for step in range(1, 101)])
    open_indexed(tmp_path)
    decoded = count_decoded(monkeypatch)
    new = [metric_row(101, a__b=101, late__metric=7), metric_row(102, a__b=102)]
    append_rows(tmp_path / "metrics.jsonl", new)
    columns = open_indexed(tmp_path)
    assert decoded == [sum(len(json.dumps(row)) + 1 for row in new)]
    np.testing.assert_array_equal(columns.column("a/b"), np.arange(1, 103))
    np.testing.assert_array_equal(columns.column("late/metric"), [math.nan] * 100 + [7, math.nan])
    assert open_indexed(tmp_path).rows == 102
    assert len(decoded) == 1, "what is in the index is not decoded again"


def test_the_parts_of_a_file_are_one_sequence_of_rows_and_each_row_is_found_again(tmp_path: Path):
    append_rows(tmp_path / "metrics.jsonl", [metric_row(1, a__b=1), metric_row(2, a__b=2)])
    open_indexed(tmp_path)
    append_rows(tmp_path / "metrics.1.jsonl", [metric_row(3, a__b=3)])
    append_rows(tmp_path / "metrics.2.jsonl", [metric_row(4, a__b=4)])
    columns = open_indexed(tmp_path)
    np.testing.assert_array_equal(columns.column("a/b"), [1, 2, 3, 4])
    np.testing.assert_array_equal(columns.column("part"), [0, 0, 1, 2])
    assert columns.read_rows([3, 0, 2]) == [
        metric_row(4, a__b=4),
        metric_row(1, a__b=1),
        metric_row(3, a__b=3),
    ]
    assert columns.read_rows(range(4)) == read_rows(tmp_path / "metrics.jsonl")


def test_a_torn_last_line_is_left_out_and_said_and_read_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append_rows(path, [metric_row(1, a__b=1)])
    whole = json.dumps(metric_row(2, a__b=2))
    with path.open("a") as file:
        file.write(whole[:30])
    columns = open_indexed(tmp_path)
    assert columns.rows == 1
    (note,) = columns.notes
    assert "torn (30 bytes)" in note
    with path.open("a") as file:
        file.write(whole[30:])
    columns = open_indexed(tmp_path)
    assert (columns.rows, columns.notes) == (2, ()), "a line that lacks only its newline is a row"
    assert columns.read_rows([1]) == [metric_row(2, a__b=2)]
    with path.open("a") as file:
        file.write("\n")
    assert open_indexed(tmp_path).rows == 2


def test_a_line_that_is_torn_before_the_last_part_is_damage(tmp_path: Path):
    append_rows(tmp_path / "metrics.jsonl", [metric_row(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage"')
    append_rows(tmp_path / "metrics.1.jsonl", [metric_row(2)])
    with pytest.raises(RunDirError, match=r"metrics\.jsonl:2 is torn"):
        open_indexed(tmp_path)


@pytest.mark.parametrize(
    "line", ["", "[1]", "{", '{"stage":"rl","step":1}', '{"stage":"rl","step":1.0,"attempt":1}']
)
@pytest.mark.parametrize("name", ["metrics", "samples", "contributions", "spans"])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, name: str, line: str):
    append_rows(tmp_path / f"{name}.jsonl", [metric_row(1), metric_row(2)])
    with (tmp_path / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    append_rows(tmp_path / f"{name}.jsonl", [metric_row(3)])
    with pytest.raises(RunDirError, match=rf"{name}\.jsonl:3 "):
        open_indexed(tmp_path, name)


def test_what_is_no_number_beside_the_head_is_left_out_of_the_columns_and_kept_in_the_row(tmp_path: Path):
    odd = metric_row(1, a__b="1.5", c__d=[1], e__f=True, g__h=2, i__j=None)
    append_rows(tmp_path / "metrics.jsonl", [odd, metric_row(2, a__b=3.5)])
    columns = open_indexed(tmp_path)
    np.testing.assert_array_equal(columns.column("a/b"), [math.nan, 3.5])
    np.testing.assert_array_equal(columns.column("g/h"), [2.0, math.nan])
    assert not {"c/d", "e/f"} & set(columns.metrics)
    assert columns.read_rows([0]) == [odd]


def test_sample_columns_hold_status_failure_and_versions(tmp_path: Path):
    failed = metric_row(2, status="failed", metadata={"failure": {"class": "reward", "message": "boom"}})
    odd = metric_row(3, status="failed", metadata={"failure": "text"}, reward="high", tokens=2**70)
    trained = metric_row(
        1,
        status="completed",
        reward=1,
        tokens=9,
        response_length=4,
        group_index=3,
        weight_version_min=0,
        weight_version_max=1,
    )
    append_rows(tmp_path / "samples.jsonl", [trained, failed, odd])
    columns = open_indexed(tmp_path, "samples")
    np.testing.assert_array_equal(columns.column("reward"), [1.0, math.nan, math.nan])
    assert {
        name: columns.column(name).tolist()
        for name in ("tokens", "response_length", "group_index", "weight_version_max")
    } == {
        "tokens": [9, -1, -1],
        "response_length": [4, -1, -1],
        "group_index": [3, -1, -1],
        "weight_version_max": [1, -1, -1],
    }
    np.testing.assert_array_equal(columns.match_text("failure", "reward"), [False, True, False])
    np.testing.assert_array_equal(columns.match_text("status", "failed"), [False, True, True])
    assert not columns.match_text("status", "pending").any()


# --- attempts -----------------------------------------------------------------------------------------------


def test_rows_that_a_later_attempt_wrote_again_are_masked_as_read_rows_would(tmp_path: Path):
    rows = [metric_row(step, 1, a__b=step) for step in range(1, 8)] + [
        metric_row(step, 2, a__b=-step) for step in range(5, 7)
    ]
    rows += [metric_row(step, 3, a__b=10 * step) for step in range(6, 9)]
    append_rows(tmp_path / "metrics.jsonl", rows)
    columns = open_indexed(tmp_path)
    kept = columns.read_rows(np.flatnonzero(columns.newest()))
    assert kept == newest_attempts(rows)
    assert [row["attempt"] for row in kept] == [1, 1, 1, 1, 2, 3, 3, 3]


def test_the_newest_attempt_is_found_per_stage():
    stage, step, attempt = np.array([1, 2, 1, 2]), np.array([1, 1, 1, 2]), np.array([1, 1, 2, 1])
    assert find_newest(stage, step, attempt).tolist() == [False, True, True, True]
    assert find_newest(stage[:0], step[:0], attempt[:0]).tolist() == []


def test_a_run_reads_the_same_from_its_index_as_without(tmp_path: Path):
    rows = [
        metric_row(step, 1 + (step > 3), a__b=step / 4, fail__reward=step % 2)
        for step in (1, 2, 3, 4, 5, 3, 4)
    ]
    append_rows(tmp_path / "metrics.jsonl", sorted(rows, key=lambda row: row["attempt"]))
    plain = read_run(tmp_path)
    open_indexed(tmp_path)
    indexed = read_run(tmp_path)
    assert (tmp_path / "index" / "metrics.json").exists()
    assert list(plain.metrics) == list(indexed.metrics)
    assert (
        series(plain.stage_rows("rl"), "a/b")
        == series(indexed.stage_rows("rl"), "a/b")
        == series(list(plain.metrics), "a/b")
    )


# --- the index on disk --------------------------------------------------------------------------------------


def write_indexed(root: Path) -> Path:
    """A run of 50 rows in its index. Returns a column's file."""
    append_rows(root / "metrics.jsonl", [metric_row(step, a__b=step) for step in range(1, 51)])
    open_indexed(root)
    (folder,) = [path for path in (root / "index").iterdir() if path.is_dir()]
    return folder / "8.bin"  # five of the head, three of the place, then the metric


def check_values(root: Path) -> None:
    for _ in range(2):
        columns = open_indexed(root)
        np.testing.assert_array_equal(columns.column("a/b"), np.arange(1, 51))
        assert columns.rows == 50


def test_bytes_behind_the_committed_rows_mean_nothing(tmp_path: Path):
    column = write_indexed(tmp_path)
    column.write_bytes(column.read_bytes() + b"left by a writer that was killed")
    check_values(tmp_path)


def test_a_column_with_a_wrong_bit_is_not_used(tmp_path: Path):
    column = write_indexed(tmp_path)
    data = bytearray(column.read_bytes())
    data[100] ^= 1
    column.write_bytes(data)
    check_values(tmp_path)


def test_a_column_that_is_cut_short_or_gone_is_not_used(tmp_path: Path):
    column = write_indexed(tmp_path)
    column.write_bytes(column.read_bytes()[:-1])
    check_values(tmp_path)
    for left in (tmp_path / "index").glob("metrics-*/*.bin"):
        left.unlink()
    check_values(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema":1}'])
def test_a_commit_that_is_none_is_not_used(tmp_path: Path, text: str):
    write_indexed(tmp_path)
    (tmp_path / "index" / "metrics.json").write_text(text)
    check_values(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 99},
        {"directory": "metrics-../../x"},
        {"rows": -1},
        {"columns": []},
        {"marks": [[7, 0, 5, 1]]},
    ],
)
def test_a_commit_of_another_version_or_that_leads_elsewhere_is_not_used(
    tmp_path: Path, change: dict[str, Any]
):
    write_indexed(tmp_path)
    commit = tmp_path / "index" / "metrics.json"
    commit.write_text(json.dumps(json.loads(commit.read_text()) | change))
    check_values(tmp_path)


def test_an_index_of_another_run_is_built_anew(tmp_path: Path):
    write_indexed(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    append_rows(tmp_path / "metrics.jsonl", [metric_row(step, a__b=2 * step) for step in range(1, 61)])
    columns = open_indexed(tmp_path)
    np.testing.assert_array_equal(columns.column("a/b"), 2 * np.arange(1, 61))
    assert len([path for path in (tmp_path / "index").iterdir() if path.is_dir()]) == 1, (
        "what the old one had is removed"
    )


def test_a_file_that_is_shorter_than_the_index_is_read_anew(tmp_path: Path):
    write_indexed(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:10]))
    assert open_indexed(tmp_path).column("a/b").tolist() == list(range(1, 11))


def test_while_another_viewer_writes_columns_are_computed_in_memory(tmp_path: Path):
    append_rows(tmp_path / "metrics.jsonl", [metric_row(step, a__b=step) for step in range(1, 51)])
    (tmp_path / "index").mkdir()
    with (tmp_path / "index" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        columns = open_indexed(tmp_path)
        assert columns.column("a/b").tolist() == list(range(1, 51))
        assert "another viewer is writing" in columns.notes[0]
        assert not (tmp_path / "index" / "metrics.json").exists()
    assert open_indexed(tmp_path).notes == ()


def test_where_the_index_cannot_be_written_columns_are_computed_in_memory(tmp_path: Path):
    append_rows(tmp_path / "metrics.jsonl", [metric_row(step, a__b=step) for step in range(1, 51)])
    (tmp_path / "index").write_text("a file is in the way")
    columns = open_indexed(tmp_path)
    assert columns.column("a/b").tolist() == list(range(1, 51))
    assert "cannot be written" in columns.notes[0]
    assert columns.rows == 50


def test_a_disk_that_fills_up_while_the_index_is_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_indexed(tmp_path)
    append_rows(tmp_path / "metrics.jsonl", [metric_row(51, a__b=51)])

    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(columns_module, "append_block", refuse)
    columns = open_indexed(tmp_path)
    assert "No space left" in columns.notes[0]
    assert columns.column("a/b").tolist() == list(range(1, 52))


def test_a_viewer_keeps_its_columns_when_another_builds_the_index_anew(tmp_path: Path):
    write_indexed(tmp_path)
    first = open_indexed(tmp_path)
    (tmp_path / "index" / "metrics.json").unlink()
    second = open_indexed(tmp_path)
    assert first.column("a/b").tolist() == second.column("a/b").tolist() == list(range(1, 51)), (
        "read after its files were removed"
    )
    assert (tmp_path / "index" / "metrics.json").exists(), "and the new index stays"


def test_an_index_that_leads_out_of_the_run_is_refused(tmp_path: Path):
    (tmp_path / "run").mkdir()
    append_rows(tmp_path / "run" / "metrics.jsonl", [metric_row(1)])
    (tmp_path / "run" / "index").symlink_to(tmp_path)
    with pytest.raises(RunDirError, match="outside"):
        open_indexed(tmp_path / "run")


def test_viewers_that_start_together_all_answer_and_leave_one_index(tmp_path: Path):
    append_rows(tmp_path / "metrics.jsonl", [metric_row(step, a__b=step) for step in range(1, 2001)])
    script = (
        "import sys; from pathlib import Path; from rollouts.inspect.columns import open_columns; from"
        " rollouts.run_dir import RunDir; print(open_columns(RunDir(Path(sys.argv[1])), 'metrics',"
        " keep_bytes=0).column('a/b').sum())"
    )
    viewers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [viewer.communicate(timeout=60)[0].strip() for viewer in viewers] == ["2001000.0"] * 3
    columns = open_indexed(tmp_path)
    assert columns.notes == ()
    assert len([path for path in (tmp_path / "index").iterdir() if path.is_dir()]) == 1


def test_the_run_that_the_benchmark_makes_up_reads_as_a_run_of_two_attempts(tmp_path: Path):
    write_run(tmp_path / "run", steps=40, samples=80)
    record = read_run(tmp_path / "run", with_samples=True)
    assert (len(record.metrics), len(record.samples), record.attempts) == (40, 80, 2)
    assert len(record.columns.metrics) == METRICS
    assert record.columns.rows == 24 + 20, "the first attempt reached 60 %, the second began again at 50 %"
