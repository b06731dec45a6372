"""Checkpoints are complete or absent, whatever stops the writer, and the newest complete one is always found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import trio

import rollouts.checkpoints.save as save_module
from rollouts.checkpoints.load import check_checkpoint, find_newest_checkpoint, is_complete, list_checkpoints, load_trainer_state
from rollouts.checkpoints.manifest import MANIFEST_SCHEMA, compute_manifest, read_manifest
from rollouts.checkpoints.retention import apply_retention, checkpoints_to_remove, remove_incomplete
from rollouts.checkpoints.save import save_checkpoint
from rollouts.errors import CheckpointError
from rollouts.run_dir import RunDir, checkpoint_manifest

STATE = {"cursor": 7, "returned": ["a", "b"], "nested": {"x": 0.5, "none": None}}


async def write_small_model(path: Path) -> None:
    (path / "config.json").write_text('{"a": 1}')
    (path / "model.safetensors").write_bytes(bytes(range(200)))
    (path / "state").mkdir()
    (path / "state" / "optimizer.safetensors").write_bytes(b"moments")
    await trio.lowlevel.checkpoint()


async def save(stage_dir: Path, step: int, write_model=write_small_model, state=None) -> Path:
    path = stage_dir / f"step_{step}"
    await save_checkpoint(path, write_model=write_model, state=STATE if state is None else state, stage=stage_dir.name, step=step)
    return path


@pytest.fixture
def stage_dir(tmp_path) -> Path:
    return RunDir(tmp_path).stage_checkpoints("rl")


# --- what a checkpoint is -----------------------------------------------------------------------------------------------------


async def test_a_saved_checkpoint_is_complete_and_gives_its_state_back(stage_dir):
    path = await save(stage_dir, 4)
    check_checkpoint(path, hashes=True)
    assert load_trainer_state(path) == STATE
    assert find_newest_checkpoint(stage_dir) == path
    assert [entry.name for entry in stage_dir.iterdir()] == ["step_4"]


async def test_the_manifest_names_every_other_file_with_size_and_hash(stage_dir):
    manifest = read_manifest(await save(stage_dir, 4))
    assert (manifest.stage, manifest.step) == ("rl", 4)
    assert [record.path for record in manifest.files] == ["config.json", "model.safetensors", "state/optimizer.safetensors", "state/trainer.json"]
    assert manifest.files[0].size == 8
    # printf '{"a": 1}' | sha256sum
    assert manifest.files[0].sha256 == "f9d86028c6e0d64e225186f96acb69338b2c59764df79162107f5c4bb34d1310"


async def test_the_manifest_is_made_after_everything_else_is_written_and_synced(stage_dir, monkeypatch):
    events: list[str] = []

    def record(name: str) -> None:
        real = getattr(save_module, name)
        monkeypatch.setattr(save_module, name, lambda *args, **kwargs: (events.append(name), real(*args, **kwargs))[1])

    for name in ("compute_manifest", "fsync_tree", "write_manifest", "fsync_path"):
        record(name)
    await save(stage_dir, 1)
    assert events == ["compute_manifest", "fsync_tree", "write_manifest", "fsync_path", "fsync_path", "fsync_path"]


async def test_nothing_has_the_checkpoints_name_until_the_end(stage_dir):
    async def look(path: Path) -> None:
        await write_small_model(path)
        assert path.parent == stage_dir
        assert not (stage_dir / "step_1").exists()
        assert find_newest_checkpoint(stage_dir) is None

    await save(stage_dir, 1, look)


async def test_the_newest_is_by_number_and_other_names_are_passed_over(stage_dir):
    assert find_newest_checkpoint(stage_dir) is None
    for step in (9, 10, 2):
        await save(stage_dir, step)
    shutil.copytree(stage_dir / "step_10", stage_dir / "step_99_backup")
    (stage_dir / "step_11").write_text("a file")
    assert find_newest_checkpoint(stage_dir) == stage_dir / "step_10"
    assert [step for step, _ in list_checkpoints(stage_dir)] == [2, 9, 10]


# --- crashes ------------------------------------------------------------------------------------------------------------------


async def test_after_a_kill_between_any_two_files_the_older_checkpoint_is_found(stage_dir, tmp_path):
    whole = await save(tmp_path / "elsewhere" / "rl", 5)
    older = await save(stage_dir, 4)
    files = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    for count in range(len(files) + 1):  # a name already in place, as on a file system that lost the rename's order
        partial = stage_dir / "step_5"
        partial.mkdir()
        for file in files[:count]:
            target = partial / file.relative_to(whole)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(file, target)
        assert find_newest_checkpoint(stage_dir) == older
        shutil.rmtree(partial)


async def test_a_kill_at_any_step_of_the_writer_leaves_the_older_or_the_newer_complete(stage_dir, monkeypatch):
    class Killed(BaseException):
        pass

    older = await save(stage_dir, 1)
    steps = ["compute_manifest", "fsync_tree", "write_manifest", "fsync_path", "rename"]
    for number, name in enumerate(steps, start=2):
        with monkeypatch.context() as patch:

            def die(*_args, **_kwargs):
                raise Killed

            patch.setattr(*((Path, "rename") if name == "rename" else (save_module, name)), die)
            with pytest.raises(Killed):
                await save(stage_dir, number)
        assert find_newest_checkpoint(stage_dir) == older
        check_checkpoint(older, hashes=True)
    assert len(remove_incomplete(stage_dir)) == len(steps)
    assert [entry.name for entry in stage_dir.iterdir()] == ["step_1"]
    assert remove_incomplete(stage_dir / "nowhere") == []


async def test_a_writer_that_fails_leaves_no_files_and_its_error_comes_through(stage_dir):
    async def fail(path: Path) -> None:
        (path / "half.safetensors").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    older = await save(stage_dir, 1)
    with pytest.raises(OSError, match="No space left"):
        await save(stage_dir, 2, fail)
    assert [entry.name for entry in stage_dir.iterdir()] == ["step_1"]
    assert find_newest_checkpoint(stage_dir) == older


async def test_a_cancelled_save_keeps_what_someone_may_still_be_writing(stage_dir, autojump_clock):
    async def hang(path: Path) -> None:
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
    assert [entry.name for entry in stage_dir.iterdir()] == ["step_3"]


async def test_a_complete_checkpoint_is_never_overwritten(stage_dir):
    path = await save(stage_dir, 3)

    async def touched(_path: Path) -> None:
        pytest.fail("wrote a model")

    with pytest.raises(CheckpointError, match="never overwritten"):
        await save(stage_dir, 3, touched, {"other": 1})
    assert load_trainer_state(path) == STATE


async def test_wrong_names_and_states_that_are_not_json_are_refused_before_anything_is_written(stage_dir):
    with pytest.raises(CheckpointError, match="its name must be step_4"):
        await save_checkpoint(stage_dir / "step_3", write_model=write_small_model, state={}, stage="rl", step=4)
    with pytest.raises(ValueError, match=r"state\.loss is nan"):
        await save(stage_dir, 3, state={"loss": float("nan")})
    assert not stage_dir.exists()


# --- damage -------------------------------------------------------------------------------------------------------------------


async def test_damage_is_found_and_named(stage_dir):
    path = await save(stage_dir, 2)
    weights = path / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(b"\xff" + original[1:])
    check_checkpoint(path, hashes=False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has not the SHA-256"):
        check_checkpoint(path, hashes=True)
    weights.write_bytes(original[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has 199 bytes; the manifest says 200"):
        check_checkpoint(path, hashes=False)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read \(No such file.*remove .*step_2 and resume"):
        check_checkpoint(path, hashes=False)


async def test_a_renamed_checkpoint_is_not_taken_for_another_step(stage_dir):
    path = await save(stage_dir, 2)
    renamed = path.rename(stage_dir / "step_7")
    with pytest.raises(CheckpointError, match="rename it to step_2"):
        check_checkpoint(renamed, hashes=False)
    best = Path(shutil.copytree(renamed, stage_dir / "best"))
    check_checkpoint(best, hashes=True)


async def test_a_checkpoint_works_wherever_it_is_copied_and_extra_files_do_no_harm(stage_dir, tmp_path):
    copy = tmp_path / "other" / "step_2"
    shutil.copytree(await save(stage_dir, 2), copy)
    (copy / "notes.txt").write_text("the good one")
    check_checkpoint(copy, hashes=True)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "cannot be read"),
        ('{"schema": 1', "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "cannot be read"),
        (json.dumps({"schema": MANIFEST_SCHEMA + 1, "files": []}), "has schema 2; this version reads 1"),
        (json.dumps({"schema": 1, "stage": "rl", "step": 2, "files": [{"path": "../x", "size": 1, "sha256": ""}]}), "does not lie in"),
        (json.dumps({"schema": 1, "stage": "rl", "step": 2, "files": [{"path": "/etc/x", "size": 1, "sha256": ""}]}), "does not lie in"),
        (json.dumps({"schema": 1, "stage": "rl", "step": 2, "files": [{"path": "x"}]}), "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(tmp_path, content, match):
    checkpoint_manifest(tmp_path).write_text(content)
    with pytest.raises(CheckpointError, match=match):
        read_manifest(tmp_path)
    assert not is_complete(tmp_path)


def test_a_checkpoint_without_manifest_was_not_finished(tmp_path):
    with pytest.raises(CheckpointError, match="it was not finished"):
        read_manifest(tmp_path)


def test_an_empty_directory_has_an_empty_manifest(tmp_path):
    assert compute_manifest(tmp_path, stage="sft", step=0).files == ()


async def test_a_trainer_state_that_is_lost_or_no_object_is_a_checkpoint_error(stage_dir):
    path = await save(stage_dir, 2)
    (path / "state" / "trainer.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_trainer_state(path)
    (path / "state" / "trainer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_trainer_state(path)
    (path / "state" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_trainer_state(path)


# --- retention ----------------------------------------------------------------------------------------------------------------


def test_all_but_the_last_go():
    assert checkpoints_to_remove([30, 10, 20, 40], 2) == [10, 20]
    assert checkpoints_to_remove([10], 2) == []
    assert checkpoints_to_remove([], 1) == []
    with pytest.raises(ValueError, match="keep_last=0"):
        checkpoints_to_remove([1], 0)


async def test_retention_counts_complete_checkpoints_only_and_touches_nothing_else(stage_dir):
    for step in (1, 2, 3, 4):
        await save(stage_dir, step)
    checkpoint_manifest(stage_dir / "step_4").unlink()
    assert apply_retention(stage_dir, 2) == [1]
    assert sorted(entry.name for entry in stage_dir.iterdir()) == ["step_2", "step_3", "step_4"]
    assert apply_retention(stage_dir, 2) == []


async def test_a_crash_while_removing_leaves_no_half_checkpoint_under_its_name(stage_dir, monkeypatch):
    for step in (1, 2):
        await save(stage_dir, step)

    def die(path, *_args, **_kwargs):
        (Path(path) / "model.safetensors").unlink()
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(OSError, match="killed"):
            apply_retention(stage_dir, 1)
    assert sorted(entry.name for entry in stage_dir.iterdir() if not entry.name.startswith(".tmp-")) == ["step_2"]
    assert len(remove_incomplete(stage_dir)) == 1
