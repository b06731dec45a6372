"""The files of the record: parts that grow to a limit, repair of what a kill has torn, a disk that
refuses.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollouts.errors import StorageError
from rollouts.metrics import record_files
from rollouts.metrics.jsonl import read_rows
from rollouts.metrics.record_files import RecordFile, write_whole
from rollouts.run_dir import list_parts, part_path


def make_line(step: int, attempt: int = 1) -> bytes:
    return b'{"stage":"rl","step":%d,"attempt":%d}\n' % (step, attempt)


# --- parts --------------------------------------------------------------------------------------------------


def write_lines(path: Path, *lines: bytes, part_bytes: int) -> None:
    file = RecordFile(path, part_bytes=part_bytes)
    for line in lines:
        file.append(line)
    file.close()


def test_a_part_that_has_reached_its_limit_is_followed_by_the_next(tmp_path: Path):
    path, lines = tmp_path / "metrics.jsonl", [make_line(step) for step in range(1, 6)]
    write_lines(path, *lines, part_bytes=2 * len(lines[0]))
    assert [part.name for part in list_parts(path)] == ["metrics.jsonl", "metrics.1.jsonl", "metrics.2.jsonl"]
    assert [part.read_bytes() for part in list_parts(path)] == [
        lines[0] + lines[1],
        lines[2] + lines[3],
        lines[4],
    ]


def test_the_next_attempt_goes_on_in_the_last_part(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for attempt in (1, 2):
        write_lines(path, make_line(1, attempt), make_line(2, attempt), part_bytes=1)
    assert [row["attempt"] for row in read_rows(path)] == [1, 1, 2, 2]
    assert len(list_parts(path)) == 4


def test_a_part_is_on_the_device_before_the_next_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, seen = tmp_path / "metrics.jsonl", list[list[Path]]()
    file = RecordFile(path, part_bytes=1)
    file.append(make_line(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: seen.append(list_parts(path)))
        file.append(make_line(2))
    file.close()
    assert seen == [[path]]


def test_only_the_last_part_is_repaired(tmp_path: Path):
    path = tmp_path / "spans.jsonl"
    path.write_bytes(make_line(1))
    part_path(path, 1).write_bytes(make_line(2) + b'{"st')
    file = RecordFile(path)
    file.append(make_line(3))
    file.close()
    assert part_path(path, 1).read_bytes() == make_line(2) + make_line(3)


# --- a disk that refuses ------------------------------------------------------------------------------------


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[:3]))
    with (tmp_path / "file").open("wb") as file:
        write_whole(file.fileno(), b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def refuse(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_part_that_cannot_be_made_lets_rows_wait_until_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "metrics.jsonl"
    file = RecordFile(path, part_bytes=1)
    file.append(make_line(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        file.append(make_line(2))
        file.append(make_line(3))
    file.close()
    assert [part.read_bytes() for part in list_parts(path)] == [make_line(1), make_line(2) + make_line(3)]
    (warning,) = caplog.messages
    assert "rows of metrics.jsonl cannot be written" in warning


def test_too_much_that_waits_and_what_is_refused_at_the_close_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(record_files, "WAITING_BYTES", 100)
    with (tmp_path / "probe").open("wb") as probe:
        next_free = probe.fileno()  # the system hands out the lowest free number
    file = RecordFile(tmp_path / "metrics.jsonl", make=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        file.append(make_line(1))
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written .*No space left"):
            file.append(3 * make_line(2))
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written"):
            file.close()
    with (tmp_path / "probe").open("wb") as probe:
        assert probe.fileno() == next_free
