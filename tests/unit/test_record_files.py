"""The files of the record: parts that grow to a limit, repair of what a kill has torn, a disk that
refuses.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollouts.errors import StorageError
from rollouts.metrics import record_files
from rollouts.metrics.jsonl import next_attempt, read_rows
from rollouts.metrics.record_files import RecordFiles, repair_last_line, write_whole
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


def test_rows_of_one_call_stay_together(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    files = RecordFiles(run_dir, part_bytes=1)
    files.append("samples", make_line(1) + make_line(2))
    files.append("samples", make_line(3))
    files.close()
    assert [path.read_bytes() for path in run_dir.parts(run_dir.samples)] == [
        make_line(1) + make_line(2),
        make_line(3),
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


def test_the_audit_log_has_one_part(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    files = RecordFiles(run_dir, part_bytes=1)
    files.append("updates", b"one\n")
    files.append("updates", b"two\n")
    files.close()
    assert run_dir.updates_log.read_text() == "one\ntwo\n"


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


@pytest.mark.parametrize("place", ["before_sync", "before_open", "after_open"])
def test_a_kill_inside_a_change_of_parts_loses_nothing(tmp_path: Path, place: str):
    run_dir = RunDir(tmp_path)

    def die_in_child() -> None:
        files = RecordFiles(run_dir, part_bytes=1)
        files.append("metrics", make_line(1))
        real_open, real_sync = os.open, os.fsync

        def die(*_: object, **__: object) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return -1

        def open_and_die(*arguments: object, **options: object) -> int:
            real_open(*arguments, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
            return die()

        os.fsync = die if place == "before_sync" else real_sync
        os.open = {"before_sync": real_open, "before_open": die, "after_open": open_and_die}[place]
        files.append("metrics", make_line(2))

    child = os.fork()
    if child == 0:
        try:
            die_in_child()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert run_dir.metrics.read_bytes() == make_line(1)
    assert [path.stat().st_size for path in run_dir.parts(run_dir.metrics)[1:]] == (
        [0] if place == "after_open" else []
    )
    assert next_attempt(run_dir) == 2
    files = RecordFiles(run_dir, part_bytes=1)
    assert files.repaired_bytes == 0
    files.append("metrics", make_line(2, attempt=2))
    files.close()
    assert [(row["step"], row["attempt"]) for row in read_rows(run_dir.metrics)] == [(1, 1), (2, 2)]


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


def test_a_torn_line_of_the_audit_log_is_cut_off(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    run_dir.updates_log.write_text("step 1  loss 0.5\nstep 2  lo")
    files = RecordFiles(run_dir)
    files.append("updates", b"step 2  loss 0.25\n")
    files.close()
    assert files.repaired_bytes == len("step 2  lo")
    assert run_dir.updates_log.read_text() == "step 1  loss 0.5\nstep 2  loss 0.25\n"


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert repair_last_line(path) == 0
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_a_torn_line_longer_than_one_read_is_cut_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_files, "TAIL_BYTES", 4)
    path = tmp_path / "rows"
    path.write_bytes(b'{"a":1}\n{"a":' + b"2" * 50)
    assert repair_last_line(path) == 55
    assert path.read_bytes() == b'{"a":1}\n'


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a"')
    assert repair_last_line(path) == 4
    assert path.read_bytes() == b""
    assert repair_last_line(path) == 0
    assert repair_last_line(tmp_path / "missing") == 0


# --- a disk that refuses ------------------------------------------------------------------------------------


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[:3]))
    with (tmp_path / "file").open("wb") as file:
        write_whole(file.fileno(), b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def refuse(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_half_line_that_could_not_be_cut_off_at_once_is_cut_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir, real_write = RunDir(tmp_path), os.write

    def write_half(file: int, data: bytes) -> int:
        real_write(file, data[: len(data) // 2])
        return refuse()

    files = RecordFiles(run_dir)
    files.append("metrics", make_line(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_half)
        patch.setattr(os, "ftruncate", refuse)
        files.append("metrics", make_line(2))
    assert run_dir.metrics.stat().st_size > len(make_line(1)), "half a line is there"
    files.append("metrics", make_line(3))
    files.close()
    assert run_dir.metrics.read_bytes() == make_line(1) + make_line(2) + make_line(3)


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
