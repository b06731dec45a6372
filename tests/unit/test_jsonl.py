"""Files of rows: parts, torn last lines, damage, attempts, and a disk that refuses."""

import os
from unittest.mock import Mock

import pytest

from rollouts.errors import RecordLost, RunDirError, StorageError
from rollouts.metrics import jsonl
from rollouts.metrics.jsonl import (
    RecordFile,
    iterate_rows,
    newest_attempts,
    next_attempt,
    parse_row,
    read_rows,
)
from rollouts.run_dir import RunDir, check_links, list_parts, part_path
from tests.support.text_tables import cases

refuse = Mock(side_effect=OSError(28, "No space left on device"))


def make_line(step, attempt=1):
    return b'{"stage":"rl","step":%d,"attempt":%d}\n' % (step, attempt)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


# --- parts --------------------------------------------------------------------------------------------------


def test_parts_are_listed_in_the_order_of_their_numbers(tmp_path):
    run_dir = RunDir(tmp_path)
    names = """metrics.10.jsonl metrics.2.jsonl metrics.jsonl metrics.1.jsonl metrics.x.jsonl metrics.01.jsonl
        metrics.0.jsonl metrics.1.jsonl.tmp metricsjsonl samples.1.jsonl metrics.1"""
    for name in names.split():
        (tmp_path / name).touch()
    found = " ".join(path.name for path in list_parts(run_dir.metrics))
    assert found == "metrics.jsonl metrics.1.jsonl metrics.2.jsonl metrics.10.jsonl"
    assert list_parts(run_dir.samples) == [tmp_path / "samples.1.jsonl"]
    assert list_parts(tmp_path / "gone/metrics.jsonl") == []


def test_a_run_directory_may_stand_beside_another_whose_name_ends_in_a_number(tmp_path):
    (tmp_path / "demo.1").mkdir()
    check_links(RunDir(tmp_path / "demo"))


def test_a_full_part_is_followed_by_the_next_also_in_the_next_attempt(path, monkeypatch):
    lines = [make_line(step, attempt) for attempt in (1, 2) for step in (1, 2, 3)]
    monkeypatch.setattr(jsonl, "PART_BYTES", 2 * len(lines[0]))
    for attempt in (0, 1):
        file = RecordFile(path)
        for line in lines[3 * attempt : 3 * attempt + 3]:
            file.append(line)
        file.close()
    parts = [path, part_path(path, 1), part_path(path, 2)]
    assert list_parts(path) == parts
    assert [part.read_bytes() for part in parts] == [b"".join(lines[at : at + 2]) for at in (0, 2, 4)]


def test_of_a_run_without_end_the_newest_parts_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "PART_BYTES", 1)
    file = RecordFile(tmp_path / "samples.jsonl", keep=2)
    for number in range(5):
        file.append(b'{"step":%d}\n' % number)
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.3.jsonl", "samples.4.jsonl"]
    assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [3, 4]


def test_a_part_is_on_the_device_before_the_next_has_its_name(path, monkeypatch):
    seen = []
    write_three(monkeypatch, path, "fsync", lambda _: seen.append(list_parts(path)))
    assert seen == [[path], [path, part_path(path, 1)]]


# --- torn lines and damage ----------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out_reported_and_repaired_by_the_next_attempt(path):
    last = part_path(path, 1)
    path.write_bytes(make_line(1))
    last.write_bytes(make_line(2) + b'{"a":3')
    said = []
    assert [row["step"] for row in iterate_rows(path, report=said.append)] == [1, 2]
    (text,) = said
    assert "metrics.1.jsonl: the last line is torn (6 bytes) and left out" in text
    file = RecordFile(path)
    file.append(make_line(3))
    file.close()
    assert last.read_bytes() == make_line(2) + make_line(3)


@cases("damage", [b"{broken", b"[1]", b"", b"\xff\xfe", b'{"attempt":"2"}', b'{"step":1.5}', b'{"stage":[]}'])
@cases("part: 0 2")
def test_damage_before_the_last_line_is_named(path, damage, part: int):
    for number in range(part):
        part_path(path, number).write_bytes(b'{"a":0}\n')
    part_path(path, part).write_bytes(b'{"a":1}\n' + damage + b'\n{"a":2}\n')
    with pytest.raises(RunDirError, match=rf"{part_path(path, part).name}:2 is not a JSON object"):
        read_rows(path)


def test_json_of_other_writers_is_read():
    """Python's own reader takes half a surrogate pair and NaN; a faster one alone would call such a row
    damaged.
    """
    assert parse_row(b'{"a":"\\ud800"}') == {"a": "\ud800"}
    assert str(parse_row(b'{"a":NaN}')) == "{'a': nan}"
    assert parse_row(b'{"a":' + 100_000 * b"[") is None


# --- attempts -----------------------------------------------------------------------------------------------


def test_readers_take_the_highest_attempt_of_each_step():
    rows = [
        {"stage": stage, "step": int(step), "attempt": int(attempt)}
        for stage, step, attempt in map(str.split, ("rl 1 1", "rl 2 1", "rl 2 2", "sft 2 1", "rl 3 2"))
    ]
    assert newest_attempts(rows) == [rows[0], *rows[2:]]


@cases("name: samples contributions spans")
def test_an_attempt_that_left_only_such_rows_has_its_number_to_itself(tmp_path, name):
    """An attempt killed between a step's samples and its row: readers saw its samples and those of the next
    attempt as one.
    """
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"attempt":1}\n')
    path = getattr(run_dir, name)
    for text, attempt in (
        ('{"attempt":1}\n{"attempt":2}\n{"attempt":2,"resp', 3),
        (f'{{"attempt":5,"response":"{200_000 * "x"}"}}\n', 6),
        ('{"attempt":null}\n', 2),
    ):
        path.write_text(text)
        assert next_attempt(run_dir) == attempt
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match=r"jsonl cannot be read .*; restore it"):
        next_attempt(run_dir)


# --- a record that is taken away ----------------------------------------------------------------------------


def take_away(path, deed):
    match deed:
        case "delete":
            path.unlink()
        case "rotate":
            path.rename(path.with_name("old"))
            path.touch()
        case "cut":
            os.truncate(path, len(make_line(1)) + 3)
        case "move":
            path.parent.rename(path.parent.with_name("moved"))


def test_rows_that_are_taken_before_the_attempt_has_written_any_are_missed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(make_line(1))
    file = RecordFile(path)
    path.unlink()
    with pytest.raises(RecordLost):
        file.close()


@cases("deed: delete rotate cut move")
@cases("more: yes no")
def test_rows_go_on_in_another_file_where_somebody_took_the_record_and_the_run_is_told(
    tmp_path, deed, more: bool
):
    """At the next row, or where none follows at the close."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = RecordFile(path)
    file.append(make_line(1) + make_line(2))
    take_away(path, deed)
    if more:
        file.append(make_line(3))
        file.append(make_line(4))
        left = make_line(1) if deed == "cut" else b""
        assert path.read_bytes() == left + make_line(3) + make_line(4)
    assert bool(file.lost) == more
    with pytest.raises(RecordLost, match=f"{path} was deleted, moved or cut by someone else"):
        file.close()


# --- a disk that refuses ------------------------------------------------------------------------------------


def write_three(monkeypatch, path, name, function):
    """Three lines, each a part; the os function of this name is replaced for the last two."""
    monkeypatch.setattr(jsonl, "PART_BYTES", 1)
    file = RecordFile(path)
    file.append(make_line(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, function)
        file.append(make_line(2))
        file.append(make_line(3))
    file.close()


def test_a_short_write_is_continued(path, monkeypatch):
    write = os.write
    write_three(monkeypatch, path, "write", lambda file, data: write(file, data[:3]))
    assert [part.read_bytes() for part in list_parts(path)] == [make_line(step) for step in (1, 2, 3)]


def test_a_part_that_cannot_be_made_lets_rows_wait_until_the_close(path, monkeypatch, caplog):
    write_three(monkeypatch, path, "open", refuse)
    assert [part.read_bytes() for part in list_parts(path)] == [make_line(1), make_line(2) + make_line(3)]
    (warning,) = caplog.messages
    assert "rows of metrics.jsonl cannot be written" in warning


def test_too_much_that_waits_and_what_is_refused_at_the_close_are_errors(path, monkeypatch):
    monkeypatch.setattr(jsonl, "WAITING_BYTES", 100)
    with path.with_name("probe").open("wb") as probe:
        next_free = probe.fileno()  # the system hands out the lowest free number
    file = RecordFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        file.append(make_line(1))
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written .*No space left"):
            file.append(3 * make_line(2))
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written"):
            file.close()
    with path.with_name("probe").open("wb") as probe:
        assert probe.fileno() == next_free
