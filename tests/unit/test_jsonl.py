"""Reading .jsonl files: parts, torn last lines, damage, attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.errors import RunDirError
from rollouts.metrics.jsonl import newest_attempts, next_attempt, parse_row, read_rows
from rollouts.run_dir import RunDir, check_links, list_parts, part_path

# --- parts --------------------------------------------------------------------------------------------------


def test_parts_are_listed_in_the_order_of_their_numbers(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    for part in (".10", ".2", "", ".1", ".x", ".01", ".0", ".1.jsonl.tmp"):
        (tmp_path / f"metrics{part}.jsonl").touch()
    for name in ("metrics.1.jsonl.tmp", "metricsjsonl", "samples.1.jsonl", "metrics.1"):
        (tmp_path / name).touch()
    found = [path.name for path in run_dir.parts(run_dir.metrics)]
    assert found == [f"metrics{part}.jsonl" for part in ("", ".1", ".2", ".10")]
    assert run_dir.parts(run_dir.samples) == [tmp_path / "samples.1.jsonl"]
    assert list_parts(tmp_path / "gone" / "metrics.jsonl") == []


@pytest.mark.parametrize("name", ["spans.3.jsonl", "tokens", "trackers"])
def test_what_leads_out_of_the_run_is_refused(tmp_path: Path, name: str):
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    (run_dir.root / name).symlink_to(tmp_path)
    with pytest.raises(RunDirError, match=f"{name} leads to"):
        check_links(run_dir)


# --- torn lines and damage ----------------------------------------------------------------------------------


def test_a_torn_last_line_is_left_out_and_reported(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n')
    part_path(path, 1).write_bytes(b'{"a":2}\n{"a":3')
    said: list[str] = []
    assert [row["a"] for row in read_rows(path, report=said.append)] == [1, 2]
    assert ["metrics.1.jsonl: the last line is torn (6 bytes) and left out" in text for text in said] == [
        True
    ]
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize("damage", [b"{broken", b"[1]", b"", b"\xff\xfe"])
@pytest.mark.parametrize("part", [0, 2])
def test_damage_before_the_last_line_is_named(tmp_path: Path, damage: bytes, part: int):
    path = tmp_path / "metrics.jsonl"
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
    places = [("rl", 1, 1), ("rl", 2, 1), ("rl", 2, 2), ("sft", 2, 1), ("rl", 3, 2)]
    rows = [dict(zip(("stage", "step", "attempt"), place, strict=True)) for place in places]
    assert newest_attempts(rows) == [rows[0], rows[2], rows[3], rows[4]]


@pytest.mark.parametrize("name", ["samples", "contributions", "spans"])
def test_an_attempt_that_left_only_such_rows_has_its_number_to_itself(tmp_path: Path, name: str):
    """An attempt killed between a step's samples and its row: readers saw its samples and those of the next
    attempt as one.
    """
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"attempt":1}\n')
    path: Path = getattr(run_dir, name)
    path.write_text('{"attempt":1}\n{"attempt":2}\n{"attempt":2,"resp')
    assert next_attempt(run_dir) == 3
    path.write_text(
        '{"attempt":5,"response":"' + 200_000 * "x" + '"}\n'
    )  # longer than what is read at a time
    assert next_attempt(run_dir) == 6
