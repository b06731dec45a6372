"""A real checkpoint, written to a disk that refuses at every single call, and read from one that has lost or
changed any of its bytes.
"""

import builtins
import errno
import io
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from rollouts.backends.captures import hold_together
from rollouts.backends.state import Position, read_state
from rollouts.checkpoints.load import check_checkpoint, find_newest_checkpoint, load_trainer_state
from rollouts.checkpoints.save import save_checkpoint
from rollouts.errors import StorageError
from rollouts.models.export import name_parts
from rollouts.models.sharded import load_sharded_weights
from rollouts.models.tokenizers import make_byte_tokenizer
from rollouts.run_dir import RunDir
from tests.unit.test_state_files import ALONE, make_model

DRAWN = 8  # places of each file that are damaged


class Trained:
    """A model that has trained a step. Each checkpoint is of a copy of its own."""

    def __init__(self):
        self.model = make_model(259)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.sum().backward()
        self.optimizer.step()

    def write(self, path):
        held = hold_together(self.model, self.optimizer, ALONE, Position(1, 0, 0), make_byte_tokenizer())
        return held.write(path)


@pytest.fixture(scope="module")
def held():
    return Trained()


@pytest.fixture
def stage_dir(tmp_path):
    return RunDir(tmp_path).stage_checkpoints("rl")


async def save(stage_dir, step, held):
    path = stage_dir / f"step_{step}"

    async def write(folder):
        name_parts(folder, [held.write(folder)])

    await save_checkpoint(path, write_model=write, state={"cursor": step}, stage="rl", step=step)
    return path


def assert_loads(checkpoint, held):
    """Its bytes are as they were written, and a fresh model and optimizer take them."""
    check_checkpoint(checkpoint, hashes=True)
    model = make_model(259)
    assert read_state(checkpoint, model, ALONE).position == Position(1, 0, 0)
    load_sharded_weights(model, checkpoint)
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in held.model.named_parameters())


# --- a disk that refuses ------------------------------------------------------------------------------------


class Disk:
    """Counts what is asked of a disk, and refuses one call (0: none). Nothing is really synced: that takes
    long.
    """

    def __init__(self, refuse_at=0, number=0):
        self.asked = []
        self._refuse_at, self._number = refuse_at, number

    def ask(self, what, path):
        self.asked.append(f"{what} {Path(str(path)).name}")
        if len(self.asked) == self._refuse_at:
            raise OSError(self._number, os.strerror(self._number), str(path))

    def install(self, patch):
        """What writes, syncs, renames and makes directories asks this disk first."""
        patch.setattr(
            os, "fsync", lambda descriptor: self.ask("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
        )
        for name in ("rename", "replace", "mkdir"):
            patch.setattr(os, name, self._asking(name, getattr(os, name)))
        opened = self._opening(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)

    def _asking(self, name, real):
        def call(path, *arguments, **options):
            if name != "mkdir" or not os.path.lexists(
                path
            ):  # else it is refused for another reason, which os.makedirs(exist_ok=True) expects
                self.ask(name, path)
            return real(path, *arguments, **options)

        return call

    def _opening(self, real):
        def call(path, mode="r", buffering=-1, encoding=None, *rest, **options):
            if not set(mode) & set("wax+") or isinstance(path, int):
                return real(path, mode, buffering, encoding, *rest, **options)
            self.ask("open", path)
            raw = RefusingFile(str(path), mode.replace("b", "").replace("t", ""), self)
            file = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return file if "b" in mode else io.TextIOWrapper(file, encoding)

        return call


class RefusingFile(io.FileIO):
    """A file each of whose writes asks the disk."""

    def __init__(self, path, mode, disk):
        super().__init__(path, mode)
        self._disk = disk

    def write(self, data):
        self._disk.ask("write", self.name)
        return super().write(data)


async def test_a_disk_that_refuses_any_single_call_of_a_save_costs_that_save_only(
    stage_dir, held, monkeypatch
):
    older, disk = await save(stage_dir, 1, held), Disk()
    with monkeypatch.context() as patch:
        disk.install(patch)
        await save(stage_dir, 2, held)
    shutil.rmtree(stage_dir / "step_2")
    for refused, what in enumerate(disk.asked, 1):
        for number in (errno.ENOSPC, *((errno.EIO, errno.EDQUOT) if refused % 9 == 0 else ())):
            with monkeypatch.context() as patch:
                Disk(refused, number).install(patch)
                with pytest.raises(StorageError) as caught:
                    await save(stage_dir, 2, held)
            error, cause = str(caught.value), caught.value.__cause__
            assert f"{stage_dir}/step_2 cannot be written ({os.strerror(number)} at " in error, what
            assert isinstance(cause, OSError) and cause.errno == number, what
            assert [path.name for path in stage_dir.iterdir()] == ["step_1"], what
            assert find_newest_checkpoint(stage_dir, hashes=True) == older, what
    written = ("config.json", "model-of-rank-0-00001.safetensors", "optimizer.safetensors", "backend.json")
    calls = {f"{call} {file}" for file in written for call in ("open", "write")}
    calls |= {"mkdir state", "rename model-of-rank-0-00001.safetensors", "write trainer.json"}
    calls |= {f"fsync {file}" for file in ("model.safetensors", "optimizer.safetensors", "manifest.json")}
    assert calls <= set(disk.asked)  # each was refused once
    assert disk.asked[-2].startswith("rename .tmp-step_2-") and disk.asked[-1] == "fsync rl"
    assert_loads(older, held)
    assert_loads(await save(stage_dir, 2, held), held)


# --- a disk that loses --------------------------------------------------------------------------------------


def damage(content, draw):
    """The file with a bit flipped, cut short, or with bytes put in, at drawn places."""
    places = [draw.randrange(len(content)) for _ in range(DRAWN)]
    flipped = [
        content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
        for place in places
    ]
    cut = [content[: draw.randrange(len(content))] for _ in range(DRAWN // 2)]
    place = draw.randrange(len(content))
    return [*flipped, *cut, b"", content[:place] + b"\0" + content[place:]]


async def test_a_checkpoint_that_is_damaged_anywhere_is_refused_by_name_and_the_one_before_is_used(
    stage_dir, held
):
    older, newer = await save(stage_dir, 1, held), await save(stage_dir, 2, held)
    files = sorted(path for path in newer.rglob("*") if path.is_file())
    named = "config.json manifest.json model.safetensors optimizer.safetensors backend.json trainer.json"
    assert {*named.split(), "tokenizer.json"} <= {file.name for file in files}
    draw = random.Random(0)

    def check_refused(named):
        reports = []
        assert find_newest_checkpoint(stage_dir, hashes=True, report=reports.append) == older, named
        assert len(reports) == 1 and named in reports[0], (named, reports)

    for file in files:
        whole = file.read_bytes()
        for content in damage(whole, draw):
            if file.name == "manifest.json" and re.search(rb'"schema": [013-9],', content):
                continue  # that would be a later version's, which is refused otherwise
            file.write_bytes(content)
            check_refused(str(file))
        file.write_bytes(whole)
    for file in files:
        moved = file.rename(file.with_name("elsewhere"))
        check_refused(file.name)
        moved.rename(file)
    assert find_newest_checkpoint(stage_dir, hashes=True) == newer
    assert load_trainer_state(newer) == {"cursor": 2}
