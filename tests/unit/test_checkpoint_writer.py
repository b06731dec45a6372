"""Checkpoints are written while training goes on, hold the step they are named after, and a disk that refuses
costs a checkpoint, not a run.
"""

from __future__ import annotations

import errno
import json
import os

import pytest
import trio

from rollouts.checkpoints.load import list_checkpoints, load_trainer_state, read_manifest
from rollouts.checkpoints.writer import Keep, open_checkpoint_writer
from rollouts.errors import StorageError
from rollouts.run_dir import RunDir
from tests.support.text_tables import cases

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SlowBackend:
    """A backend whose copies are written at once, or when they `may_go`, and can be made to fail. Notes what
    is asked.
    """

    def __init__(self, may_go=None, *, room=True):
        self.room = room  # for a copy
        self.may_go = may_go
        self.value = 0
        self.failures = 0  # writes that are still to fail
        self.calls = []

    def state_bytes(self):
        return 3000

    def capture(self):
        self.calls.append("capture")
        held = Held(self, self.value) if self.room else None
        return Done(lambda: held)

    def save(self, path):
        self.calls.append("save")
        return Done(lambda: self._write(path, self.value))

    def reset(self):
        self.calls.append("reset")
        return Done(lambda: None)

    def _write(self, path, value):
        (path / "model").write_text(str(value))
        if self.failures:
            self.failures -= 1
            raise NO_SPACE


class Held:
    """A copy."""

    def __init__(self, backend, value):
        self.backend, self.value = backend, value

    async def __call__(self, path):
        if self.backend.may_go is not None:
            await self.backend.may_go.wait()
        self.backend.calls.append("write")
        self.backend._write(path, self.value)

    def drop(self):
        self.backend.calls.append("drop")


class Done:
    """A future whose work is done at once."""

    def __init__(self, work):
        self._work = work

    async def result(self):
        await trio.lowlevel.checkpoint()
        return self._work()


def open_writer(backend, tmp_path, warnings, *, keep=None, **parts):
    return open_checkpoint_writer(
        {"": backend, **parts},
        RunDir(tmp_path),
        "rl",
        config_hash="abc",
        keep=keep or Keep(),
        warn=warnings.append,
    )  # pyright: ignore[reportCallIssue]


def saved_steps(tmp_path):
    return [step for step, _ in list_checkpoints(RunDir(tmp_path).stage_checkpoints("rl"))]


def read_value(tmp_path, step):
    return (tmp_path / f"checkpoints/rl/step_{step}/model").read_text()


async def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_its_own_step(tmp_path):
    backend, state = SlowBackend(may_go := trio.Event()), {"cursor": [1]}
    path = RunDir(tmp_path).checkpoint("rl", 1)
    async with open_writer(backend, tmp_path, []) as writer:
        backend.value = 1
        await writer.save(1, state)
        assert not path.exists()  # it returned before anything was in place
        backend.value, state["cursor"] = 2, [2]  # the next step
        may_go.set()
        await writer.wait_written()
    assert read_value(tmp_path, 1) == "1"
    assert load_trainer_state(path) == {"cursor": [1]}
    assert read_manifest(path).config_hash == "abc"
    assert backend.calls == ["capture", "write", "drop"]


@cases("room: yes no")
async def test_what_is_written_besides_belongs_to_the_checkpoint_and_can_fail_it(tmp_path, room: bool):
    backend, warnings, refuse = SlowBackend(room=room), [], False

    async def write_more(path):
        if refuse:
            raise NO_SPACE
        (path / "more").write_text((path / "model").read_text() + "!")

    async with open_writer(backend, tmp_path, warnings) as writer:
        await writer.save(1, {}, write_more=[("", write_more)])
        await writer.wait_written()
        refuse = True
        await writer.save(2, {}, write_more=[("", write_more)])
    path = RunDir(tmp_path).checkpoint("rl", 1)
    assert (path / "more").read_text() == "0!"
    assert "more" in [record.path for record in read_manifest(path).files]
    assert saved_steps(tmp_path) == [1]
    assert "step_2 cannot be written (No space left on device)" in warnings[0]


async def test_a_save_at_work_is_finished_when_the_run_is_cancelled_or_fails(tmp_path):
    backend = SlowBackend(may_go := trio.Event())
    with trio.CancelScope() as scope:
        async with open_writer(backend, tmp_path, []) as writer:
            await writer.save(1, {})
            scope.cancel()
            may_go.set()
            await trio.sleep_forever()
    with pytest.RaisesGroup(KeyError):
        async with open_writer(backend, tmp_path, []) as writer:
            await writer.save(2, {})
            raise KeyError
    assert [read_value(tmp_path, step) for step in (1, 2)] == ["0", "0"]


@cases("room: yes no")
async def test_a_critic_is_saved_beside_the_policy_and_a_copy_of_one_alone_is_freed(tmp_path, room: bool):
    policy, critic = SlowBackend(), SlowBackend(room=room)
    critic.value = 7
    async with open_writer(policy, tmp_path, [], critic=critic) as writer:
        await writer.save(1, {})
    assert (read_value(tmp_path, 1), read_value(tmp_path, "1/critic")) == ("0", "7")
    assert policy.calls == (["capture", "write", "drop"] if room else ["capture", "drop", "save"])


async def test_without_room_for_a_copy_training_waits_and_a_save_that_fails_leaves_the_backend_usable(
    tmp_path,
):
    backend = SlowBackend(room=False)
    backend.failures = 1
    async with open_writer(backend, tmp_path, []) as writer:
        await writer.save(1, {})
        assert backend.calls == ["capture", "save", "reset"]
        assert writer.take_metrics() == {"checkpoint/failed": 1.0}
        await writer.save(2, {})
        assert read_value(tmp_path, 2) == "0"
    assert backend.calls[3:] == ["capture", "save"]
    assert saved_steps(tmp_path) == [2]


@cases("failures: 1 2")
async def test_the_last_save_is_tried_twice(tmp_path, failures: int):
    backend, warnings = SlowBackend(), []
    backend.failures = failures

    async def run():
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


async def test_what_retention_keeps_is_applied_after_each_save(tmp_path):
    row = {"stage": "rl", "attempt": 1, "step": 1, "name": "heldout", "score": 0.5}
    RunDir(tmp_path).evaluations.write_text(json.dumps(row) + "\n")
    async with open_writer(SlowBackend(), tmp_path, [], keep=Keep(1, "score")) as writer:
        for step in (1, 2, 3):
            await writer.save(step, {})
    assert saved_steps(tmp_path) == [1, 3]


async def test_too_little_room_for_two_checkpoints_is_a_warning_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(SlowBackend, "state_bytes", lambda self: 1 << 50)
    warnings = []
    async with open_writer(SlowBackend(), tmp_path / "not/there", warnings):
        pass
    assert "two checkpoints of this model take 2097152.0 GiB" in warnings[0]
