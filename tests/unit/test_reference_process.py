"""A reference in a process of its own: it may die, be cancelled or be given nonsense, and nothing of it is
left.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.device_thread import open_device_thread
from rollouts.distributed.commands import Command, decode_command
from rollouts.errors import ModelError, ScoringError
from rollouts.models.tiny import make_tiny
from rollouts.reference.messages import decode_batch, decode_scores, encode_batch, encode_frame
from rollouts.reference.process import ReferenceProcess, open_reference_process
from rollouts.reference.score import open_frozen_reference
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import RolloutBatch

BATCH = make_batch(groups=2, size=2)
LONG = make_batch(groups=16, size=16)
UNKNOWN = RolloutBatch(
    tokens=(np.asarray([5, 300, 7]),), loss_masks=(np.asarray([False, False, True]),)
)  # 300 is no token of the model
UNPREDICTED = RolloutBatch(tokens=(np.arange(3),), loss_masks=(np.ones(3, bool),))  # trains its first token


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", 0, tmp_path_factory.mktemp("models"))


def open_process(path: Path, folder: Path, **options: Any):
    return open_reference_process(path, log_dir=folder, torch_threads=1, **options)


async def score_plainly(path: Path, batch: RolloutBatch):
    async with (
        open_device_thread(name="plain", torch_threads=1) as thread,
        open_frozen_reference(path, device_thread=thread) as reference,
    ):
        return await reference.score(batch)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def kill(scorer: ReferenceProcess) -> None:
    os.kill(scorer.pid, signal.SIGKILL)
    assert scorer._child is not None
    await scorer._child.wait_ended()


async def test_cancelled_calls_and_bad_batches_do_not_spoil_the_next_one(path: Path, tmp_path: Path):
    async with open_process(path, tmp_path) as scorer:
        pid = scorer.pid
        for timeout_s in (0.0, 0.001, 0.02):
            with trio.move_on_after(timeout_s) as scope:
                await scorer.score(LONG)
            assert scope.cancelled_caught
        with pytest.raises(ScoringError, match="trains the first token"):
            await scorer.score(UNPREDICTED)
        with pytest.raises(ScoringError, match="IndexError"):
            await scorer.score(UNKNOWN)
        found = await scorer.score(BATCH)
        assert (scorer.restarts, scorer.pid) == (0, pid)
    for one, two in zip(found, await score_plainly(path, BATCH), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


async def test_a_killed_child_is_started_again_once_and_then_is_an_error(path: Path, tmp_path: Path):
    said: list[str] = []
    async with open_process(path, tmp_path, say=said.append) as scorer:
        expected = await scorer.score(BATCH)
        first = scorer.pid
        await kill(scorer)
        again = await scorer.score(BATCH)
        assert all(np.array_equal(one, two) for one, two in zip(again, expected, strict=True))
        assert scorer.pid != first
        assert scorer.restarts == 1
        assert "was killed by SIGKILL and is started again" in said[0]
        await kill(scorer)
        for _ in range(2):
            with pytest.raises(
                ScoringError, match="killed by SIGKILL, after it had been started again 1 time"
            ):
                await scorer.score(BATCH)
    assert not is_alive(first)
    assert not is_alive(scorer.pid)


async def test_a_child_that_stands_still_can_be_given_up(path: Path, tmp_path: Path):
    large = RolloutBatch(
        tokens=(np.zeros(1 << 20, np.int64),), loss_masks=(np.arange(1 << 20) == 5,)
    )  # more than a socket holds
    async with open_process(path, tmp_path) as scorer:
        stopped = scorer.pid
        os.kill(stopped, signal.SIGSTOP)
        for batch in (BATCH, large):
            with trio.move_on_after(0.5) as scope:
                await scorer.score(batch)
            assert scope.cancelled_caught
        assert not is_alive(stopped)
        assert len(await scorer.score(BATCH)) == len(BATCH)
        assert scorer.restarts == 0, "it did not end by itself"


@pytest.mark.slow
async def test_a_child_that_dies_at_work_costs_no_answer(path: Path, tmp_path: Path):
    async with open_process(path, tmp_path) as scorer:
        async with trio.open_nursery() as nursery:

            async def kill_at_work() -> None:
                await trio.sleep(0.05)
                os.kill(scorer.pid, signal.SIGKILL)

            nursery.start_soon(kill_at_work)
            found = [await scorer.score(LONG) for _ in range(3)]
        assert scorer.restarts == 1
    expected = await score_plainly(path, LONG)
    for rows in found:
        for one, two in zip(rows, expected, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-4)


async def test_nothing_is_left_after_an_error(path: Path, tmp_path: Path):
    opened: list[ReferenceProcess] = []

    async def fail_inside() -> None:
        async with open_process(path, tmp_path) as scorer:
            opened.append(scorer)
            assert is_alive(scorer.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    assert not is_alive(opened[0].pid)
    with pytest.raises(ScoringError, match="closed"):
        await opened[0].score(BATCH)


PROGRAM = """
import pathlib, sys, trio
from rollouts.reference.process import open_reference_process

async def main():
    async with open_reference_process(pathlib.Path(sys.argv[1]), log_dir=pathlib.Path(sys.argv[2]), torch_threads=1) as scorer:
        print(scorer.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="needs pidfd_open to wait for a process that is no child"
)
def test_nothing_is_left_when_the_trainer_is_killed(path: Path, tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(tmp_path)], stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        child = os.pidfd_open(int(trainer.stdout.readline()))
        trainer.kill()
    ended, _, _ = select.select([child], [], [], 60.0)
    assert ended, "the child outlives the trainer"
    os.close(child)


async def test_a_model_that_cannot_be_loaded_keeps_its_error(tmp_path: Path):
    with pytest.raises(ModelError, match="nowhere"):
        async with open_process(tmp_path / "nowhere", tmp_path):
            pass


async def test_a_child_that_takes_too_long_to_load_is_an_error_and_is_gone(path: Path, tmp_path: Path):
    with pytest.raises(ScoringError, match=r"start_s=0\.2"):
        async with open_process(path, tmp_path, start_s=0.2):
            pass


# --- messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch", [BATCH, RolloutBatch(tokens=(), loss_masks=()), make_batch(3, temperature=0.25)]
)
def test_a_batch_crosses_as_it_is(batch: RolloutBatch):
    frame = b"".join(encode_frame(Command("score", {"id": 7}, encode_batch(batch))))
    assert int.from_bytes(frame[:8], "little") == len(frame) - 8
    command = decode_command(frame[8:])
    arrived = decode_batch(command.arrays)
    assert (command.name, command.fields["id"], arrived.temperature) == ("score", 7, batch.temperature)
    for name in ("tokens", "loss_masks"):
        sent, got = getattr(batch, name), getattr(arrived, name)
        assert len(sent) == len(got)
        assert all(np.array_equal(one, two) for one, two in zip(sent, got, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5])
def test_numbers_that_are_no_log_probs_are_refused_where_a_token_trains(value: float):
    tokens = RolloutBatch(tokens=(np.arange(3),), loss_masks=(np.asarray([False, True, False]),))
    good = np.asarray([value, -1.0, value], np.float32)
    assert decode_scores(Command("scored", {"id": 1}, {"log_probs": good}), tokens)[0][1] == -1
    with pytest.raises(ScoringError, match="token 1 of row 0"):
        decode_scores(
            Command("scored", {"id": 1}, {"log_probs": np.asarray([0.0, value, 0.0], np.float32)}), tokens
        )
    with pytest.raises(ScoringError, match="no 3 log-probs"):
        decode_scores(Command("scored", {"id": 1}, {"log_probs": good[:2]}), tokens)
