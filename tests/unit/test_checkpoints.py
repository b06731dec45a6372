"""Checkpoints are complete or absent, whatever stops the writer, and the newest complete one is always
found.
"""

import errno
import os
import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
from safetensors import SafetensorError

import rollouts.checkpoints.load as load_module
import rollouts.checkpoints.save as save_module
from rollouts.checkpoints.load import (
    FileRecord,
    Manifest,
    check_checkpoint,
    encode_manifest,
    find_newest_checkpoint,
    is_complete,
    list_checkpoints,
    load_trainer_state,
    read_manifest,
)
from rollouts.checkpoints.retention import apply_retention, choose_checkpoint, read_scores, remove_incomplete
from rollouts.checkpoints.save import find_os_error, save_checkpoint
from rollouts.errors import CheckpointError, RunDirError, StorageError
from rollouts.run_dir import RunDir, check_links, checkpoint_manifest
from tests.support.recorded_writes import record_writes
from tests.support.text_tables import cases, write_jsonl

STATE = {"cursor": 7, "returned": ["a", "b"], "nested": {"x": 0.5, "none": None}}


async def write_small_model(path):
    (path / "config.json").write_text('{"a": 1}')
    (path / "model.safetensors").write_bytes(bytes(range(200)))
    (path / "state").mkdir()
    (path / "state/optimizer.safetensors").write_bytes(b"moments")
    await trio.lowlevel.checkpoint()


async def refuse_to_write(_path):
    pytest.fail("wrote a model")


async def save(stage_dir, step, write_model=write_small_model, **options):
    path = stage_dir / f"step_{step}"
    options = {"state": STATE, "stage": stage_dir.name, "step": step} | options
    await save_checkpoint(path, write_model=write_model, **options)
    return path


choose = partial(choose_checkpoint, config_hash=None)


def names_in(stage_dir):
    return sorted(path.name for path in stage_dir.iterdir())


@pytest.fixture
def stage_dir(tmp_path):
    return RunDir(tmp_path).stage_checkpoints("rl")


# --- what a checkpoint is -----------------------------------------------------------------------------------


async def test_files_are_synced_before_the_manifest_the_manifest_before_the_name_and_the_name_last(
    stage_dir, monkeypatch
):
    written = record_writes(monkeypatch, "rename")
    await save(stage_dir, 1)
    calls = [re.sub(r"\.tmp-.*", "TEMPORARY", call) for call in written]
    files = "config.json model.safetensors state optimizer.safetensors trainer.json"
    assert {*calls[:5]} == {f"fsync {name}" for name in files.split()}
    assert calls[5] == "fsync TEMPORARY"  # a directory is synced after what it names
    assert calls[6:] == ["fsync manifest.json", "fsync TEMPORARY", "rename step_1", "fsync rl"]


async def test_the_newest_is_by_number_and_other_names_are_passed_over(stage_dir):
    assert find_newest_checkpoint(stage_dir) is None
    for step in (9, 10, 2):
        await save(stage_dir, step)
    shutil.copytree(stage_dir / "step_10", stage_dir / "step_99_backup")
    (stage_dir / "step_11").write_text("a file")
    assert find_newest_checkpoint(stage_dir) == stage_dir / "step_10"
    assert [step for step, _ in list_checkpoints(stage_dir)] == [2, 9, 10]


# --- crashes ------------------------------------------------------------------------------------------------


async def test_a_kill_at_any_step_of_the_writer_leaves_the_older_or_the_newer_complete(
    stage_dir, monkeypatch
):
    killed = Mock(side_effect=SystemExit)
    older = await save(stage_dir, 1)
    steps = ["compute_manifest", "fsync_tree", "encode_manifest", "fsync_path", "read_back", "Path.rename"]
    for number, name in enumerate(steps, start=2):
        with monkeypatch.context() as patch:
            patch.setattr(f"rollouts.checkpoints.save.{name}", killed)
            with pytest.raises(SystemExit):
                await save(stage_dir, number)
        assert find_newest_checkpoint(stage_dir) == older
        check_checkpoint(older, hashes=True)
    assert len(remove_incomplete(stage_dir)) == len(steps)
    assert names_in(stage_dir) == ["step_1"]
    assert remove_incomplete(stage_dir / "nowhere") == []


async def test_a_cancelled_save_keeps_what_someone_may_still_be_writing(stage_dir, autojump_clock):
    async def hang(path):
        (path / "half.safetensors").write_bytes(b"x")
        await trio.sleep_forever()

    with trio.move_on_after(1) as scope:
        await save(stage_dir, 1, hang)
    assert scope.cancelled_caught
    assert find_newest_checkpoint(stage_dir) is None
    (leftover,) = stage_dir.iterdir()
    assert leftover.name.startswith(".tmp-step_1-")
    assert remove_incomplete(stage_dir) == [leftover]


async def test_an_incomplete_checkpoint_is_replaced(stage_dir):
    path = await save(stage_dir, 3)
    (path / "model.safetensors").unlink()
    (path / "stale.bin").write_bytes(b"")
    assert find_newest_checkpoint(stage_dir) is None
    await save(stage_dir, 3)
    check_checkpoint(path, hashes=True)
    assert not (path / "stale.bin").exists()
    remove_incomplete(stage_dir)
    assert names_in(stage_dir) == ["step_3"]


async def test_a_complete_checkpoint_is_never_overwritten(stage_dir):
    path = await save(stage_dir, 3)
    with pytest.raises(CheckpointError, match="never overwritten"):
        await save(stage_dir, 3, refuse_to_write, state={"other": 1})
    assert load_trainer_state(path) == STATE


# --- damage -------------------------------------------------------------------------------------------------


def manifest_of(path):
    """As a hostile hand would write it: with the right hash of itself."""
    return encode_manifest(Manifest("rl", 2, None, (FileRecord(path, 1, ""),))).decode()


@cases(r"""
content                                  | match
                                         | cannot be read
[]                                       | cannot be read
{}                                       | cannot be read
{"schema": 2, "files": [{"path": "x"}]}  | cannot be read
{"schema": 3, "files": []}               | has schema 3; this version reads 2
of ../x                                  | changed or damaged
of /etc/x                                | changed or damaged
of a\0b                                  | changed or damaged
of x, with another stage                 | changed or damaged
""")
def test_a_manifest_that_cannot_be_trusted_is_refused(tmp_path, content, match):
    if content.startswith("of "):
        path, _, other = content[3:].replace(r"\0", "\0").partition(",")
        content = manifest_of(path).replace("rl", "lr" if other else "rl")
    checkpoint_manifest(tmp_path).write_text(content)
    with pytest.raises(CheckpointError, match=match):
        read_manifest(tmp_path)
    if "has schema" in match:
        with pytest.raises(CheckpointError, match="use the version of rollouts that wrote it"):
            is_complete(tmp_path)  # it may be: nobody is to write over it
    else:
        assert not is_complete(tmp_path)


async def test_a_trainer_state_that_is_lost_or_no_object_is_a_checkpoint_error(stage_dir):
    path = await save(stage_dir, 2)
    file = path / "state/trainer.json"
    for text, problem in (("[1]", "holds a list"), ("{", "cannot be read"), ("", "cannot be read")):
        file.write_text(text) if text else file.unlink()
        with pytest.raises(CheckpointError, match=problem):
            load_trainer_state(path)


# --- retention ----------------------------------------------------------------------------------------------


async def test_retention_counts_complete_checkpoints_only_and_touches_nothing_else(stage_dir):
    for step in (1, 2, 3, 4):
        await save(stage_dir, step)
    checkpoint_manifest(stage_dir / "step_4").unlink()
    assert apply_retention(stage_dir, 2) == [1]
    assert names_in(stage_dir) == ["step_2", "step_3", "step_4"]
    assert apply_retention(stage_dir, 2) == []


async def test_a_crash_while_removing_leaves_no_half_checkpoint_under_its_name(stage_dir, monkeypatch):
    for step in (1, 2):
        await save(stage_dir, step)

    def die(path, *_args, **_kwargs):
        (Path(path) / "model.safetensors").unlink()
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("rollouts.checkpoints.retention.rmtree", die)
        with pytest.raises(OSError, match="killed"):
            apply_retention(stage_dir, 1)
    assert [name for name in names_in(stage_dir) if not name.startswith(".tmp-")] == ["step_2"]
    assert len(remove_incomplete(stage_dir)) == 1


async def test_retention_never_removes_the_newest_or_the_best(stage_dir, tmp_path):
    # step 4 was lost and trained again
    rows = ("rl", 1, 2, 0.9), ("rl", 1, 4, 0.2), ("rl", 2, 4, 0.95), ("rl", 2, 6, 0.1), ("sft", 1, 8, 1.0)
    names, run_dir = ("stage", "attempt", "step", "eval/heldout/avg@1"), RunDir(tmp_path)
    write_rows(run_dir.evaluations, [dict(zip(names, row, strict=True)) for row in rows])
    scores = read_scores(run_dir, "rl", names[-1], pytest.fail)
    assert scores == {2: 0.9, 4: 0.95, 6: 0.1}
    for step in (2, 4, 6, 8):
        await save(stage_dir, step)
    assert apply_retention(stage_dir, 1, scores) == [2, 6]
    assert [step for step, _ in list_checkpoints(stage_dir)] == [4, 8]
    assert read_scores(RunDir(tmp_path / "nothing"), "rl", "x", pytest.fail) == {}


def write_rows(path, rows):
    write_jsonl(path, *({"stage": "rl", "name": "heldout", **row} for row in rows))


def test_a_score_of_weights_that_were_lost_and_trained_again_does_not_count(tmp_path):
    run_dir, first = RunDir(tmp_path), [{"attempt": 1, "step": step} for step in range(1, 7)]
    write_rows(run_dir.evaluations, [row | {"score": row["step"] / 10} for row in first[1::2]])
    write_rows(run_dir.metrics, [*first, {"attempt": 2, "step": 4}])
    assert read_scores(run_dir, "rl", "score", pytest.fail) == {2: 0.2}  # attempt 2 went on after step 3


# --- reading back -------------------------------------------------------------------------------------------


async def test_a_disk_that_gives_other_bytes_back_fails_the_save(stage_dir, monkeypatch):
    older = await save(stage_dir, 1)
    sync = save_module.fsync_tree

    def sync_and_rot(root):
        sync(root)
        file = root / "model.safetensors"
        file.write_bytes(b"\xff" + file.read_bytes()[1:])

    monkeypatch.setattr(save_module, "fsync_tree", sync_and_rot)
    with pytest.raises(StorageError, match=r"model\.safetensors reads back otherwise than it was written"):
        await save(stage_dir, 2)
    assert names_in(stage_dir) == [older.name]


# --- any damage, anywhere -----------------------------------------------------------------------------------


async def test_a_damaged_checkpoint_loses_its_name_and_its_steps_can_be_saved_again(stage_dir):
    older, newer = await save(stage_dir, 4), await save(stage_dir, 8)
    (newer / "model.safetensors").write_bytes(bytes(200))
    reports = []
    assert choose(stage_dir, report=reports.append) == older
    assert "has not the SHA-256" in reports[0]
    assert "training goes on after step 4" in reports[1]
    assert choose(stage_dir, report=pytest.fail) == older  # it is reported once
    await save(stage_dir, 8)
    assert find_newest_checkpoint(stage_dir, hashes=True) == newer
    (aside,) = stage_dir.glob("damaged-step_8-*")
    assert (aside / "model.safetensors").read_bytes() == bytes(200)  # nothing is deleted


# --- what cannot be read is not damaged ---------------------------------------------------------------------


@cases("error: EIO ESTALE EACCES EMFILE")
@cases("operation: compute_sha256 stat read_bytes")
async def test_a_newest_checkpoint_that_cannot_be_read_stops_the_resume_and_keeps_its_name(
    stage_dir, monkeypatch, error, operation
):
    number = getattr(errno, error)
    await save(stage_dir, 4)
    newest = await save(stage_dir, 8)
    file = checkpoint_manifest(newest) if operation == "read_bytes" else newest / "model.safetensors"
    owner = load_module if operation == "compute_sha256" else Path
    real = getattr(owner, operation)

    def refuse(path, *args, **kwargs):
        if path == file:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, operation, refuse)
        with pytest.raises(
            CheckpointError,
            match=rf"{file.name} cannot be read now \({os.strerror(number)}\).*nothing was changed; see that",
        ):
            choose(stage_dir, report=pytest.fail)
    assert names_in(stage_dir) == ["step_4", "step_8"]
    assert choose(stage_dir, report=pytest.fail) == newest


async def test_when_every_checkpoint_is_damaged_training_does_not_start_over_by_itself(stage_dir):
    for step in (4, 8):
        (await save(stage_dir, step) / "model.safetensors").write_bytes(b"")
    (stage_dir / "step_12").mkdir()
    reports = []
    match = (
        r"(?s)no checkpoint in .*rl is as it was written.*restore one of step_8, step_4 from a copy, or"
        r" remove.*model\.safetensors has 0 bytes"
    )
    with pytest.raises(CheckpointError, match=match):
        choose(stage_dir, report=reports.append)
    assert len(reports) == 3
    assert names_in(stage_dir) == ["step_12", "step_4", "step_8"]
    for step in (4, 8):
        shutil.rmtree(stage_dir / f"step_{step}")
    reports.clear()
    assert choose(stage_dir, report=reports.append) is None  # what was never finished is no checkpoint
    assert "step_12 has no manifest.json" in reports[0]
    assert [name.partition("-")[0] for name in names_in(stage_dir)] == ["damaged"]


async def test_a_checkpoint_of_other_settings_is_refused_by_name(stage_dir):
    path = await save(stage_dir, 3, config_hash="aaaa")
    assert choose(stage_dir, config_hash="aaaa", report=pytest.fail) == path
    with pytest.raises(CheckpointError, match="step_3 was made with other settings"):
        choose(stage_dir, config_hash="bbbb", report=pytest.fail)
    assert path.is_dir()


# --- names --------------------------------------------------------------------------------------------------


@cases("name: weights checkpoints engines config.toml metrics.jsonl spans.3.jsonl tokens trackers")
def test_nothing_of_a_run_may_be_a_link_that_leads_out_of_it(tmp_path, name):
    run = tmp_path / "run"
    (run / "inside").mkdir(parents=True)
    link = run / name
    link.symlink_to(run / "inside")
    check_links(RunDir(run))
    for target, problem in (
        (tmp_path / "elsewhere", r"leads to .*elsewhere, outside .*run; remove that link"),
        (name, r"cannot be followed \(.*remove the symbolic link"),
    ):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(RunDirError, match=f"run/{name} {problem}"):
            check_links(RunDir(run))


async def test_links_in_a_checkpoint_are_refused_when_written_and_when_read(stage_dir, tmp_path):
    (tmp_path / "outside").write_bytes(bytes(range(200)))

    def put_link(path):
        (path / "model.safetensors").unlink()
        (path / "model.safetensors").symlink_to(tmp_path / "outside")

    async def write_link(path):
        await write_small_model(path)
        put_link(path)

    with pytest.raises(CheckpointError, match="is a link or no file"):
        await save(stage_dir, 1, write_link)
    put_link(path := await save(stage_dir, 2))
    with pytest.raises(CheckpointError, match=r"is a link to .*outside"):
        check_checkpoint(path, hashes=True)
    (stage_dir / "step_9").symlink_to(await save(tmp_path / "other/rl", 9))
    with pytest.raises(CheckpointError, match="step_9 is a link"):
        find_newest_checkpoint(stage_dir)


# --- a disk that refuses ------------------------------------------------------------------------------------


async def test_too_little_room_is_said_before_anything_is_written(stage_dir):
    with pytest.raises(StorageError, match=r"iB are free there, 1073741824.0 GiB are needed"):
        await save(stage_dir, 2, refuse_to_write, expected_bytes=1 << 60)
    assert names_in(stage_dir) == []


def test_what_libraries_in_rust_say_of_a_disk_is_understood_and_nothing_else_is():
    too_large = SafetensorError("Error while serializing: I/O error: File too large (os error 27)")
    no_space = Exception("No space left on device (os error 28)")
    assert [find_os_error(one).errno for one in (too_large, no_space)] == [errno.EFBIG, errno.ENOSPC]
    assert find_os_error(ValueError("no (os error 28)")) is find_os_error(Exception("no space")) is None
