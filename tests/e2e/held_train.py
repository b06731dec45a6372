"""train.py that stands still in one phase of its second RL step, or is stopped after a step. Run as `python
-m tests.e2e.held_train ARGUMENTS`.

HOLD names the phase; where it is unset, nothing is held. HOLD_METRICS is the run's metrics.jsonl,
HOLD_REACHED the file that is made when the phase is reached. Phases that a user's function can hold are held
by one: reward, loss and eval_reward below stand in the test's config. STOP_AFTER=stage:step requests the stop
when that step's row is written: the moment is the same in every run, which that of a signal is not. ENCODED
names a file that gets a line whenever the state of the rollout manager is made JSON.
"""

import dataclasses
import os
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

PIECE_S = 0.5  # of a held micro-batch, and between two looks at a file
PAUSE_S = 7.0
RELEASED = "released"  # beside HOLD_REACHED


def is_held(phase):
    """Whether this phase is held now: after the row of the first RL step, and, but for the evaluation, before
    that of the second.
    """
    if os.environ.get("HOLD") != phase:
        return False
    metrics = Path(os.environ["HOLD_METRICS"])
    rows = metrics.read_text().count('"stage":"rl"') if metrics.exists() else 0
    return rows == (2 if phase == "evaluate" else 1)


def note_reached():
    Path(os.environ["HOLD_REACHED"]).touch()


def block():
    """For good. Only a process of its own can be ended here."""
    note_reached()
    while True:
        time.sleep(PIECE_S)


def reward(sample):
    if is_held("reward"):
        block()
    return float(len(sample.response) % 3)


async def async_reward(sample):
    """Holds the event loop: for good, or once for longer than a loop may be silent."""
    if is_held("loop"):
        block()
    if is_held("pause") and not Path(os.environ["HOLD_REACHED"]).exists():
        note_reached()
        time.sleep(PAUSE_S)  # noqa: ASYNC251
    return reward(sample)


def thieving_reward(sample):
    """Takes the record away, once."""
    metrics = Path(os.environ.get("HOLD_METRICS", ""))
    if is_held("delete"):
        metrics.unlink()
    if is_held("move"):
        metrics.parent.rename(metrics.parent.with_name("moved"))
    return reward(sample)


def eval_reward(sample):
    if is_held("evaluate"):
        block()
    return float(len(sample.response) % 2)


def loss(inputs, *, unit, **params):
    """REINFORCE weighted by numbers that torch draws, slow where it is held: many micro-batches, each a piece
    that an interrupt has to wait for.
    """
    import torch

    from rollouts.losses import LOSSES

    if is_held("train"):
        note_reached()
        time.sleep(PIECE_S)
    drawn = dataclasses.replace(inputs, advantages=inputs.advantages * torch.rand_like(inputs.advantages))
    return LOSSES["reinforce"](drawn, unit=unit, **params)


def hold_calls(function, phase, *, until_released=False):
    """The async function; in its phase a call waits first, for good or until RELEASED is there."""
    import trio

    released = Path(os.environ["HOLD_REACHED"]).with_name(RELEASED)

    async def held(*arguments, **options):
        if is_held(phase):
            note_reached()
            while not (until_released and released.exists()):  # noqa: ASYNC110
                await trio.sleep(PIECE_S)
        return await function(*arguments, **options)

    return held


def hold_generate():
    from rollouts.generation import generate

    original = generate.make_chat_generate

    def make_held(*arguments, **options):
        return hold_calls(original(*arguments, **options), "generate")

    generate.make_chat_generate = make_held


def hold_sync():
    from rollouts.weight_sync.sync import WeightSync

    WeightSync.__call__ = hold_calls(WeightSync.__call__, "sync")


def hold_save():
    from rollouts.checkpoints import writer

    writer.save_checkpoint = hold_calls(writer.save_checkpoint, "save", until_released=True)


def hold_startup():
    import trio

    import rollouts.engines.local

    @asynccontextmanager
    async def held(*arguments, **options):
        note_reached()
        await trio.sleep_forever()
        yield

    rollouts.engines.local.open_local_engine = held


def stop_after(stage, step):
    import integration_training.run as program
    from rollouts.metrics.writer import JsonlLogger

    open_stop = program.open_stop
    log_step = JsonlLogger.log_step
    controls = []

    @asynccontextmanager
    async def open_and_note(*arguments, **options):
        async with open_stop(*arguments, **options) as stop:
            controls.append(stop)
            yield stop

    async def log_and_stop(self, *arguments, **options):
        await log_step(self, *arguments, **options)
        if arguments[:2] == (stage, step):
            controls[0].request()

    program.open_stop = open_and_note
    JsonlLogger.log_step = log_and_stop  # pyright: ignore[reportAttributeAccessIssue]


def count_encoded(file):
    from rollouts.generation.async_rollout_manager import AsyncRolloutManager

    original = AsyncRolloutManager.snapshot

    def snapshot(self):
        encode = original(self)

        def note_and_encode():
            with file.open("a") as lines:
                lines.write("encoded\n")
            return encode()

        return note_and_encode

    AsyncRolloutManager.snapshot = snapshot


def main(argv=None):
    from integration_training.train import main as train

    if "ENCODED" in os.environ:
        count_encoded(Path(os.environ["ENCODED"]))
    hold = {"generate": hold_generate, "sync": hold_sync, "save": hold_save, "startup": hold_startup}.get(
        os.environ.get("HOLD", "")
    )
    if hold is not None:
        hold()
    if "STOP_AFTER" in os.environ:
        stage, _, step = os.environ["STOP_AFTER"].partition(":")
        stop_after(stage, int(step))
    return train(argv)


if __name__ == "__main__":
    sys.exit(main())
