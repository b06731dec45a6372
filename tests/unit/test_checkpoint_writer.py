"""Checkpoints are written while training goes on, hold the step they are named after, and a disk that refuses
costs a checkpoint, not a run.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from rollouts.checkpoints.load import list_checkpoints, load_trainer_state
from rollouts.checkpoints.manifest import read_manifest
from rollouts.checkpoints.writer import CapturingBackend, CheckpointWriter, Keep, open_checkpoint_writer
from rollouts.errors import CheckpointError, StorageError
from rollouts.run_dir import RunDir
from rollouts.testing.torch_contracts import SFT, make_batch
from tests.unit.test_pytorch_backend import open_backend

PLENTY = 1 << 40


class SlowBackend:
    """A CapturingBackend whose writes wait for `go`, and can be made to fail. Counts what it was asked for."""

    def __init__(self, *, captures: bool = True) -> None:
        self.go = trio.Event()
        self.value = 0
        self.failures = 0  # writes that are still to fail
        self.calls: list[str] = []
        if not captures:
            self.capture = None

    def state_bytes(self) -> int:
        return 3000

    def held_bytes(self) -> int:
        return 1000

    def capture(self) -> Done:
        value = self.value
        self.calls.append("capture")

        async def write(path: Path) -> None:
            await self.go.wait()
            self._write(path, value)

        return Done(write)

    def save(self, path: Path) -> Done:
        self.calls.append("save")
        return Done(lambda: self._write(path, self.value), call=True)

    def reset(self) -> Done:
        self.calls.append("reset")
        return Done(None)

    def _write(self, path: Path, value: int) -> None:
        (path / "model").write_text(str(value))
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FailingCapture(SlowBackend):
    """One whose copies fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def capture(self) -> Done:
        self.calls.append("capture")

        def fail() -> None:
            raise self.error

        return Done(fail, call=True)


class Done:
    """A future that is finished."""

    def __init__(self, value: object, *, call: bool = False) -> None:
        self._value, self._call = value, call

    async def result(self) -> object:
        await trio.lowlevel.checkpoint()
        return self._value() if self._call else self._value  # type: ignore[operator]


@asynccontextmanager
async def open_writer(
    backend: object,
    tmp_path: Path,
    warnings: list[str],
    *,
    keep: Keep | None = None,
    free: int | None = PLENTY,
) -> AsyncIterator[CheckpointWriter]:
    opened = open_checkpoint_writer(
        backend,
        RunDir(tmp_path),
        "rl",
        config_hash="abc",
        keep=keep or Keep(),
        warn=warnings.append,
        free_memory=lambda: free,
    )  # pyright: ignore[reportCallIssue]
    async with opened as writer:
        yield writer


def read_value(tmp_path: Path, step: int) -> str:
    return (RunDir(tmp_path).checkpoint("rl", step) / "model").read_text()


async def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_its_own_step(tmp_path):
    backend, state = SlowBackend(), {"cursor": [1]}
    async with open_writer(backend, tmp_path, []) as writer:
        backend.value = 1
        await writer.save(1, state)
        assert not RunDir(tmp_path).checkpoint("rl", 1).exists(), "it returned before anything was in place"
        backend.value, state["cursor"] = 2, [2]  # the next step
        backend.go.set()
        await writer.wait_written()
    assert read_value(tmp_path, 1) == "1"
    assert load_trainer_state(RunDir(tmp_path).checkpoint("rl", 1)) == {"cursor": [1]}
    assert read_manifest(RunDir(tmp_path).checkpoint("rl", 1)).config_hash == "abc"
    assert backend.calls == ["capture"]


@pytest.mark.parametrize("free", [PLENTY, 0])
async def test_what_is_written_besides_belongs_to_the_checkpoint_and_can_fail_it(tmp_path, free):
    backend, warnings, refuse = SlowBackend(), [], False
    backend.go.set()

    async def write_more(path: Path) -> None:
        if refuse:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (path / "more").write_text((path / "model").read_text() + "!")

    async with open_writer(backend, tmp_path, warnings, free=free) as writer:
        await writer.save(1, {}, write_more=write_more)
        await writer.wait_written()
        refuse = True
        await writer.save(2, {}, write_more=write_more)
    path = RunDir(tmp_path).checkpoint("rl", 1)
    assert (path / "more").read_text() == "0!"
    assert "more" in [record.path for record in read_manifest(path).files]
    assert [step for step, _ in list_checkpoints(path.parent)] == [1]
    assert "step_2 cannot be written (No space left on device)" in warnings[0]


async def test_the_next_save_waits_for_the_one_before_and_leaving_waits_for_the_last(tmp_path):
    backend = SlowBackend()
    async with open_writer(backend, tmp_path, []) as writer, trio.open_nursery() as nursery:
        await writer.save(1, {})
        nursery.start_soon(writer.save, 2, {})
        await trio.testing.wait_all_tasks_blocked()
        assert backend.calls == ["capture"], "one copy at a time"
        backend.go.set()
    assert [step for step, _ in list_checkpoints(RunDir(tmp_path).stage_checkpoints("rl"))] == [1, 2]


async def test_a_save_at_work_is_finished_when_the_run_is_cancelled_or_fails(tmp_path):
    backend = SlowBackend()
    with trio.CancelScope() as scope:
        async with open_writer(backend, tmp_path, []) as writer:
            await writer.save(1, {})
            scope.cancel()
            backend.go.set()
            await trio.sleep_forever()
    assert read_value(tmp_path, 1) == "0"
    with pytest.RaisesGroup(KeyError):
        async with open_writer(backend, tmp_path, []) as writer:
            await writer.save(2, {})
            raise KeyError
    assert read_value(tmp_path, 2) == "0"


@pytest.mark.parametrize(("free", "calls"), [(1249, ["save"]), (1250, ["capture"]), (None, ["capture"])])
async def test_without_memory_for_a_copy_training_waits(tmp_path, free, calls):
    backend = SlowBackend()
    backend.go.set()
    async with open_writer(backend, tmp_path, [], free=free) as writer:
        await writer.save(1, {})
    assert backend.calls == calls
    assert read_value(tmp_path, 1) == "0"


async def test_a_backend_that_finds_no_room_by_itself_is_saved_while_training_waits(tmp_path):
    class FullBackend(SlowBackend):
        def capture(self) -> Done:
            self.calls.append("capture")
            return Done(None)

    backend, warnings = FullBackend(), []
    async with open_writer(backend, tmp_path, warnings) as writer:
        await writer.save(1, {})
        assert read_value(tmp_path, 1) == "0"
        assert (backend.calls, warnings, writer.statistics()["beside_training"]) == (
            ["capture", "save"],
            [],
            0.0,
        )


async def test_a_save_that_fails_beside_training_is_a_warning_and_a_metric_and_the_next_one_succeeds(
    tmp_path,
):
    backend, warnings = SlowBackend(), []
    backend.go.set()
    async with open_writer(backend, tmp_path, warnings) as writer:
        await writer.save(1, {})
        await writer.wait_written()
        backend.failures = 1
        await writer.save(2, {})
        await writer.wait_written()
        assert writer.take_metrics() == {"checkpoint/failed": 1.0}
        assert writer.take_metrics() == {}
        await writer.save(3, {})
    (warning,) = warnings
    assert "step_2 cannot be written (No space left on device)" in warning
    assert "training goes on" in warning
    assert sorted(path.name for path in RunDir(tmp_path).stage_checkpoints("rl").iterdir()) == [
        "step_1",
        "step_3",
    ]
    assert "reset" not in backend.calls, "the backend had no part in it"
    assert writer.statistics()["saved"] == 2
    assert writer.statistics()["failed"] == 1


class HeldElsewhere:
    """A copy of which other processes have a part."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def __call__(self, path: Path) -> None:
        self.calls.append("write")

    def drop(self) -> None:
        self.calls.append("drop")


async def test_a_copy_that_others_hold_is_dropped_when_the_disk_is_full_before_anything_is_written(
    tmp_path, monkeypatch
):
    backend, warnings = SlowBackend(), []
    backend.capture = lambda: Done(HeldElsewhere(backend.calls))
    async with open_writer(backend, tmp_path, warnings) as writer:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
        await writer.save(1, {})
        await writer.wait_written()
        assert (backend.calls, len(warnings)) == (["drop"], 1)
        monkeypatch.undo()
        await writer.save(2, {})
    assert backend.calls == ["drop", "write", "drop"], "the copy knows by itself that it was written"


async def test_a_save_that_fails_while_training_waits_leaves_the_backend_usable(tmp_path):
    backend, warnings = SlowBackend(), []
    backend.failures = 1
    async with open_writer(backend, tmp_path, warnings, free=0) as writer:
        await writer.save(1, {})
        assert backend.calls == ["save", "reset"]
        assert writer.take_metrics() == {"checkpoint/failed": 1.0}
        await writer.save(2, {})
    assert [step for step, _ in list_checkpoints(RunDir(tmp_path).stage_checkpoints("rl"))] == [2]


@pytest.mark.parametrize("failures", [1, 2])
async def test_the_last_save_is_tried_twice(tmp_path, failures):
    backend, warnings = SlowBackend(), []
    backend.go.set()
    backend.failures = failures

    async def run() -> None:
        async with open_writer(backend, tmp_path, warnings) as writer:
            await writer.save(5, {}, last=True)

    if failures == 1:
        await run()
        assert read_value(tmp_path, 5) == "0"
        assert "once more" in warnings[0]
    else:
        with pytest.RaisesGroup(pytest.RaisesExc(StorageError, match="step_5 cannot be written")):
            await run()
        assert list(RunDir(tmp_path).stage_checkpoints("rl").iterdir()) == []
    assert backend.calls == ["save", "reset"] * failures + ["save"] * (2 - failures)


async def test_an_error_that_is_no_disks_ends_the_run(tmp_path):
    backend = SlowBackend()
    backend.go.set()
    with pytest.RaisesGroup(CheckpointError):
        async with open_writer(backend, tmp_path, []) as writer:
            await writer.save(1, {})
            await writer.save(1, {})
            await trio.sleep_forever()


async def test_what_retention_keeps_is_applied_after_each_save(tmp_path):
    backend = SlowBackend()
    backend.go.set()
    row = {"stage": "rl", "attempt": 1, "step": 1, "name": "heldout", "score": 0.5}
    RunDir(tmp_path).evaluations.write_text(json.dumps(row) + "\n")
    async with open_writer(backend, tmp_path, [], keep=Keep(1, "score")) as writer:
        for step in (1, 2, 3):
            await writer.save(step, {})
    assert [step for step, _ in list_checkpoints(RunDir(tmp_path).stage_checkpoints("rl"))] == [1, 3]


async def test_a_damaged_file_of_evaluations_costs_retention_and_not_the_run(tmp_path):
    backend, warnings = SlowBackend(), []
    backend.go.set()
    RunDir(tmp_path).evaluations.write_text("{torn\n{}\n")
    async with open_writer(backend, tmp_path, warnings, keep=Keep(1, "score")) as writer:
        for step in (1, 2):
            await writer.save(step, {})
    assert [step for step, _ in list_checkpoints(RunDir(tmp_path).stage_checkpoints("rl"))] == [1, 2]
    assert len(warnings) == 2
    assert "evaluations.jsonl:1 is not a JSON object" in warnings[0]


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("HIP has none left"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you"
            " tried to allocate 8 bytes."
        ),
        RuntimeError("CUDA error: out of memory"),
    ],
)
async def test_a_copy_that_finds_no_memory_after_all_is_saved_while_training_waits(tmp_path, error):
    backend, warnings = FailingCapture(error), []
    async with open_writer(backend, tmp_path, warnings) as writer:
        await writer.save(1, {})
        assert backend.calls == ["capture", "reset", "save"]
        assert writer.take_metrics() == {}, "nothing failed"
    assert read_value(tmp_path, 1) == "0"
    assert "no memory for a copy" in warnings[0]


async def test_a_copy_that_fails_for_another_reason_ends_the_run(tmp_path):
    backend = FailingCapture(RuntimeError("the device is gone"))
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the device is gone")):
        async with open_writer(backend, tmp_path, []) as writer:
            await writer.save(1, {})
    assert backend.calls == ["capture"]


async def test_too_little_room_for_two_checkpoints_is_a_warning_at_the_start(tmp_path, monkeypatch):
    class HugeBackend(SlowBackend):
        def state_bytes(self) -> int:
            return 1 << 50

    warnings: list[str] = []
    async with open_writer(HugeBackend(), tmp_path / "not" / "there", warnings):
        pass
    assert "two checkpoints of this model take 2097152.0 GiB" in warnings[0]


# --- the real backend ---------------------------------------------------------------------------------------


async def test_the_pytorch_backend_is_copied_in_a_moment_and_written_beside_steps_bit_for_bit(tmp_path):
    batch = make_batch(seed=1)
    async with open_backend() as backend:
        assert isinstance(backend, CapturingBackend)
        await backend.forward_backward(batch, SFT).result()
        await backend.optim_step().result()
        before, after, both = tmp_path / "before", tmp_path / "after", tmp_path / "both"
        await backend.save(before).result()
        write: Callable[[Path], Awaitable[None]] = await backend.capture().result()
        moved = backend.forward_backward(batch, SFT), backend.optim_step()
        after.mkdir()
        await write(after)
        for future in moved:
            await future.result()
        both.mkdir()
        await write(both)
    names = sorted(path.relative_to(before) for path in before.rglob("*") if path.is_file())
    assert {"model.safetensors", "config.json"} <= {str(name) for name in names}
    for name in names:
        assert (before / name).read_bytes() == (after / name).read_bytes() == (both / name).read_bytes(), name


async def test_what_is_held_is_as_large_as_was_said(tmp_path):
    async with open_backend() as backend:
        await backend.forward_backward(make_batch(seed=1), SFT).result()
        await backend.optim_step().result()
        await backend.save(tmp_path / "saved").result()
        size = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*.safetensors"))
        assert (
            backend.state_bytes() <= size <= backend.state_bytes() + 200_000
        )  # two headers, random state, a counter for each parameter


FULL_DISK = """
import logging, resource, sys
from pathlib import Path
import trio
from rollouts.checkpoints.load import check_checkpoint, find_newest_checkpoint
from rollouts.checkpoints.writer import Keep, open_checkpoint_writer
from rollouts.errors import StorageError
from rollouts.models.tokenizers import make_byte_tokenizer
from rollouts.run_dir import RunDir
from rollouts.testing.torch_contracts import SFT, make_batch
from tests.unit.test_pytorch_backend import open_backend

async def train(backend):
    await backend.forward_backward(make_batch(seed=1), SFT).result()
    return (await backend.optim_step().result()).step

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

async def main():
    run_dir, warnings = RunDir(Path(sys.argv[1])), []
    stage = run_dir.stage_checkpoints("sft")
    async with open_backend(tokenizer=make_byte_tokenizer()) as backend:
        for free in (1 << 40, 0):
            async with open_checkpoint_writer(backend, run_dir, "sft", keep=Keep(), warn=warnings.append, free_memory=lambda: free) as writer:
                step = await train(backend)
                await writer.save(step, {"cursor": 1})
                await writer.wait_written()
                older = find_newest_checkpoint(stage, hashes=True)
                sizes = sorted({path.stat().st_size for path in older.rglob("*") if path.is_file()})
                for size in [0, *(size - 1 for size in sizes), sizes[-1] // 2] if free else [0, sizes[0] - 1, sizes[-1] - 1]:
                    warnings.clear()
                    limit(size)
                    await writer.save(await train(backend), {"cursor": 1})
                    await writer.wait_written()
                    limit(resource.RLIM_INFINITY)
                    assert len(warnings) == 1 and "cannot be written (File too large" in warnings[0], (size, warnings)
                    assert find_newest_checkpoint(stage, hashes=True) == older
                    assert all(path.name.startswith("step_") for path in stage.iterdir()), list(stage.iterdir())
                step = await train(backend)
                await writer.save(step, {"cursor": 1}, last=True)
                assert find_newest_checkpoint(stage, hashes=True).name == f"step_{step}"
                await backend.load(find_newest_checkpoint(stage)).result()
    print("ended", len(sizes))

trio.run(main)
"""


@pytest.mark.slow
def test_a_limit_on_file_size_at_every_file_of_a_real_checkpoint_costs_that_checkpoint_only(tmp_path):
    """The system refuses with EFBIG where a full disk has ENOSPC; both come from write() and mean the same to
    us.
    """
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 5
