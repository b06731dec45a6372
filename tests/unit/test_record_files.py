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
from rollouts.metrics.record_files import RecordFiles, write_whole
from rollouts.run_dir import RunDir, part_path


def make_line(step: int, attempt: int = 1) -> bytes:
    return b'{"stage":"rl","step":%d,"attempt":%d}\n' % (step, attempt)


def read_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# --- parts --------------------------------------------------------------------------------------------------


def test_a_part_that_has_reached_its_limit_is_followed_by_the_next(tmp_path: Path):
    run_dir, line = RunDir(tmp_path), make_line(1)
    files = RecordFiles(run_dir, part_bytes=2 * len(line))
    for step in range(1, 6):
        files.append("metrics", make_line(step))
    files.append("samples", line)
    files.close()
    assert [path.read_bytes() for path in run_dir.parts(run_dir.metrics)] == [
        make_line(1) + make_line(2),
        make_line(3) + make_line(4),
        make_line(5),
    ]
    assert read_names(tmp_path) == [
        "evaluations.jsonl",
        "metrics.1.jsonl",
        "metrics.2.jsonl",
        "metrics.jsonl",
        "samples.jsonl",
    ]


def test_the_next_attempt_goes_on_in_the_last_part(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    for attempt in (1, 2):
        files = RecordFiles(run_dir, part_bytes=1)
        files.append("metrics", make_line(1, attempt))
        files.append("metrics", make_line(2, attempt))
        files.close()
    assert [row["attempt"] for row in read_rows(run_dir.metrics)] == [1, 1, 2, 2]
    assert len(run_dir.parts(run_dir.metrics)) == 4


def test_a_part_is_on_the_device_before_the_next_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir = RunDir(tmp_path)
    files = RecordFiles(run_dir, part_bytes=1)
    files.append("metrics", make_line(1))
    seen: list[list[Path]] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: seen.append(run_dir.parts(run_dir.metrics)))
        files.append("metrics", make_line(2))
    files.close()
    assert seen == [[run_dir.metrics]]


# --- torn lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics", "samples", "evaluations", "contributions", "spans"])
def test_only_the_last_part_is_repaired(tmp_path: Path, name: str):
    run_dir = RunDir(tmp_path)
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(make_line(1))
    part_path(path, 1).write_bytes(make_line(2) + b'{"st')
    files = RecordFiles(run_dir)
    assert files.repaired_bytes == 4
    files.append(name, make_line(3))
    files.close()
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


def test_a_part_that_cannot_be_made_lets_rows_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run_dir = RunDir(tmp_path)
    files = RecordFiles(run_dir, part_bytes=1)
    files.append("metrics", make_line(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        files.append("metrics", make_line(2))
        files.append("spans", make_line(2))
    files.append("metrics", make_line(3))
    files.close()
    assert [path.read_bytes() for path in run_dir.parts(run_dir.metrics)] == [
        make_line(1),
        make_line(2) + make_line(3),
    ]
    assert run_dir.spans.read_bytes() == make_line(2), "what waited is written at the close"
    (warning,) = caplog.messages
    assert "rows of metrics.jsonl cannot be written" in warning


def test_too_much_that_waits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_files, "WAITING_BYTES", 100)
    files = RecordFiles(RunDir(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        files.append("metrics", make_line(1))
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written .*No space left"):
            files.append("metrics", 3 * make_line(2))
    files.close()


def test_what_is_still_refused_at_the_close_is_an_error_and_the_files_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with (tmp_path / "probe").open("wb") as probe:
        next_free = probe.fileno()  # the system hands out the lowest free number
    files = RecordFiles(RunDir(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        files.append("metrics", make_line(1))
        with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written"):
            files.close()
    with (tmp_path / "probe").open("wb") as probe:
        assert probe.fileno() == next_free
