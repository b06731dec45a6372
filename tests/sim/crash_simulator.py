"""The rollout manager and the DataBuffer in a process that dies at any task step and starts again from its
last committed checkpoint.

    process 1 ── batch, batch ─ capture ─ commit (some time later) ─ batch ── dies at task step n: everything in memory is gone
    process 2 ── from the newest committed state ── … ── dies ──► process 3 ── … ── every batch is trained

In virtual time. A checkpoint is captured after a step and becomes complete later, while the next batch is
made, as when saving goes on beside training. What the weights have seen is what the checkpoint's steps
trained; later steps are lost with the process, and their prompts come again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio
import trio.testing

from rollouts.types import RolloutBatch
from tests.sim.simulator import (
    MOST_VIRTUAL_S,
    RecordingBuffer,
    Schedule,
    Simulation,
    draw_schedule,
    engine_version_of,
)

Tamper = Callable[[Any, Any], None]
"""Falsifies the saved states of buffer and manager in place, to see that it is noticed."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that is complete. The last three are what an all-knowing observer writes beside it; a new
    process does not read them.
    """

    steps: int
    state: str  # JSON of buffer and manager
    trained: tuple[
        tuple[int, str], ...
    ]  # (epoch, prompt id) of every group that the weights have seen, in order
    sample_ids: tuple[tuple[str, ...], ...]  # by step
    out: frozenset[tuple[int, str]]  # prompts that are used up or held


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What a run with its crashes came to."""

    crashes: int
    lost_steps: int  # computed by a process that died before they were committed
    trained: tuple[tuple[int, str], ...]
    sample_ids: tuple[tuple[str, ...], ...]
    task_steps: int  # of the last process


def draw_crash_schedule(seed: int, *, steps: int = 4) -> Schedule:
    """A schedule whose faults never end a run by themselves."""
    drawn = draw_schedule(seed)
    config = drawn.config.model_copy(update={"max_attempts": 200, "max_failed_fraction": 1.0})
    return replace(
        drawn,
        config=config,
        batches=steps,
        broken_filter_rate=0.0,
        cancel_after_s=(math.inf,) * steps,
        restart_after=-1,
        snapshot_at_s=math.inf,
        fault_rate=min(drawn.fault_rate, 0.1),
    )


def run_with_crashes(
    schedule: Schedule,
    crash_after: Sequence[int],
    *,
    checkpoint_every: int = 1,
    save_s: float = 1.0,
    tamper: Tamper | None = None,
) -> CrashReport:
    """Runs processes one after the other: the i-th dies after crash_after[i] task steps, if it lives so long,
    and the last is left alone.

    Raises AssertionError, naming the schedule, when a prompt trained twice, was lost, or the books do not
    balance.
    """
    committed = Committed(0, "", (), (), frozenset())
    crashes = lost = task_steps = 0
    for limit in [*crash_after, None]:
        process = _Process(
            schedule, committed, limit, checkpoint_every=checkpoint_every, save_s=save_s, tamper=tamper
        )
        try:
            trio.run(process.run, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[process])
        except BaseException as error:
            error.add_note(
                f"crash_after={list(crash_after)}, checkpoint_every={checkpoint_every}, save_s={save_s},"
                f" schedule {schedule}"
            )
            raise
        crashes += process.dead
        lost += process.simulation.version - process.committed.steps if process.dead else 0
        committed, task_steps = process.committed, process.task_steps
        if not process.dead:
            break
    return CrashReport(crashes, lost, committed.trained, committed.sample_ids, task_steps)


class _Process(trio.abc.Instrument):
    """One life of the program."""

    def __init__(
        self,
        schedule: Schedule,
        committed: Committed,
        limit: int | None,
        *,
        checkpoint_every: int,
        save_s: float,
        tamper: Tamper | None,
    ) -> None:
        self.schedule = schedule
        self.committed = committed
        self.simulation = Simulation(schedule)
        self.dead = False
        self.task_steps = 0
        self._limit = limit
        self._checkpoint_every = checkpoint_every
        self._save_s = save_s
        self._tamper = tamper
        self._life = trio.CancelScope()
        self._batches: list[RolloutBatch] = []

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Dies in time. What tasks still do on their way out changes memory that nobody reads again."""
        self.task_steps += 1
        if self.task_steps == self._limit:
            self.dead = True
            self._life.cancel()

    async def run(self) -> None:
        with self._life:
            self._start_from_checkpoint()
            with trio.fail_after(MOST_VIRTUAL_S):
                await self._train()
        if not self.dead:
            assert self.committed.steps == self.schedule.batches, "the run ended without its last checkpoint"
            self._check_every_prompt()

    def _start_from_checkpoint(self) -> None:
        simulation, committed = self.simulation, self.committed
        if not committed.steps:
            return
        simulation.buffer = RecordingBuffer(simulation.make_buffer(), set(committed.out))
        states = json.loads(committed.state)
        if self._tamper is not None:
            self._tamper(*states)
        simulation.buffer, simulation.manager = simulation.resume(json.dumps(states))
        simulation.version = committed.steps
        simulation.trained = set(committed.trained)
        simulation.report.prompt_keys = list(committed.trained)
        simulation.report.sample_ids = [list(ids) for ids in committed.sample_ids]
        simulation.check_books()

    async def _train(self) -> None:
        simulation = self.simulation
        async with trio.open_nursery() as helpers:
            helpers.start_soon(simulation.abort_now_and_then)
            async with trio.open_nursery() as saves:
                while simulation.version < self.schedule.batches:
                    simulation.engine.set_version(engine_version_of(self.schedule, simulation.version))
                    outcome = await simulation.run_batch(math.inf)
                    assert outcome == "delivered", outcome
                    simulation.check_books()
                    if (
                        simulation.version % self._checkpoint_every == 0
                        or simulation.version == self.schedule.batches
                    ):
                        saves.start_soon(self._commit, self._capture())
            helpers.cancel_scope.cancel()

    def _capture(self) -> Committed:
        simulation = self.simulation
        return Committed(
            steps=simulation.version,
            state=json.dumps([simulation.buffer.buffer.state_dict(), simulation.manager.state_dict()]),
            trained=tuple(simulation.report.prompt_keys),
            sample_ids=tuple(tuple(ids) for ids in simulation.report.sample_ids),
            out=frozenset(simulation.buffer.out),
        )

    async def _commit(self, captured: Committed) -> None:
        await trio.sleep(self._save_s)
        if not self.dead and captured.steps > self.committed.steps:
            self.committed = captured

    def _check_every_prompt(self) -> None:
        """Every prompt that ever left the stream trained once, is held, waits, or was given up once for a
        reason of its own.
        """
        simulation = self.simulation
        buffer = simulation.buffer.buffer
        trained = simulation.report.prompt_keys
        assert (
            len(trained) == len(set(trained)) == self.schedule.batches * self.schedule.config.num_prompts
        ), "a prompt trained twice"
        groups = [
            group
            for ids in simulation.report.sample_ids
            for group in {sample_id.partition("-")[0] for sample_id in ids}
        ]
        assert len(groups) == len(set(groups)), "an attempt trained twice"
        drawn = {
            prompt.key for prompt in simulation.make_buffer().get_prompts(int(buffer.statistics()["drawn"]))
        }
        waiting = {(epoch, prompt_id) for prompt_id, epoch in buffer.state_dict()["returned"]}
        assert drawn == simulation.buffer.out | waiting, "a prompt was lost"
        assert not simulation.buffer.out & waiting, "a prompt is used up and waits"


def draw_crashes(draw: random.Random, task_steps: int) -> list[int]:
    """After how many task steps the first processes die: one to three of them, each at any step of a run of
    `task_steps`.
    """
    return [draw.randint(1, task_steps) for _ in range(draw.choice([1, 1, 2, 3]))]
