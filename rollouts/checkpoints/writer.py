"""Saving while training goes on: a step's state is copied, then written and proven meanwhile; what retention
does not keep goes.

    save(step) ─ waits for the save before it ─► copy, on the device thread ─► returns: training goes on
                                                      └─► a task: write, hash, sync, read back, name, retain
    no memory for a copy, or the last save of a stage: save() returns when the checkpoint is in place
    the disk refuses: the old checkpoints stay, a warning, checkpoint/failed in the next row, the next save as
                      usual; the last save is tried twice and then raises StorageError

Leaving the context waits for the save at work, also when an exception or a cancellation leaves it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio

from rollouts.checkpoints.load import is_complete
from rollouts.checkpoints.retention import apply_retention, read_scores
from rollouts.checkpoints.save import WriteModel, format_bytes, save_checkpoint
from rollouts.errors import RolloutsError, StorageError
from rollouts.metrics.spans import CHECKPOINTS, TRAINER, SpanRecorder
from rollouts.protocols import TrainFuture
from rollouts.run_dir import RunDir
from rollouts.types import JSONValue, check_json, encode_json

# of a checkpoint besides tensors, and room for the rows that are written meanwhile
DISK_MARGIN_BYTES = 1 << 20


class HeldCopy(Protocol):
    """A copy of a backend's state."""

    async def __call__(self, path: Path) -> None:
        """Writes it to a directory, once, while steps run."""
        ...

    def drop(self) -> None:
        """Frees it, if it was not written. Returns at once."""
        ...


class SavingBackend(Protocol):
    """A TrainingBackend, or several that are saved together."""

    def save(self, path: Path) -> TrainFuture[None]: ...
    def reset(self) -> TrainFuture[None]: ...
    def state_bytes(self) -> int:
        """What capture() holds and save() writes, in bytes."""
        ...

    def capture(self) -> TrainFuture[Any]:
        """What save() would write now, as a HeldCopy; None: there is no room for it."""
        ...


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays of a stage's checkpoints."""

    last: int = 0  # newest ones; 0: all
    best_by: str | None = None  # a metric in evaluations.jsonl; the one with the highest stays too


def retain(run_dir: RunDir, stage: str, keep: Keep, warn: Callable[[str], object]) -> None:
    """Removes the checkpoints of a stage that need not stay. After every save, and at a resume: a run may
    have been killed between the two.

    Blocking: run it in a thread. What cannot be removed is warned of, and stays.
    """
    if not keep.last:
        return
    scores = None
    try:
        if keep.best_by:
            scores = read_scores(run_dir, stage, keep.best_by, lambda line: warn(f"warning: {line}"))
        apply_retention(run_dir.stage_checkpoints(stage), keep.last, scores)
    except (OSError, RolloutsError) as error:  # of rows, or of checkpoints: too many are no loss
        warn(f"warning: old checkpoints could not be removed and take up space: {error}")


class CheckpointWriter:
    """Saves the checkpoints of one stage. Made by open_checkpoint_writer."""

    def __init__(
        self,
        nursery: trio.Nursery,
        backend: SavingBackend,
        run_dir: RunDir,
        stage: str,
        config_hash: str | None,
        keep: Keep,
        warn: Callable[[str], object],
        spans: SpanRecorder | None,
    ) -> None:
        self._nursery = nursery
        self._backend = backend
        self._run_dir = run_dir
        self._stage = stage
        self._config_hash = config_hash
        self._keep = keep
        self._warn = warn
        self._spans = spans
        self._idle = trio.Event()  # set while nothing is being written
        self._idle.set()
        self._failed_before_row = 0.0
        names = ("saved", "failed", "beside_training", "held_up_s", "write_s")
        self._statistics: dict[str, float] = dict.fromkeys(names, 0.0)

    async def save(
        self,
        step: int,
        state: Mapping[str, JSONValue],
        *,
        last: bool = False,
        write_more: WriteModel | None = None,
    ) -> None:
        """Saves `step`, completed and idle, with the loop's `state`, which is read before training goes on,
        and what `write_more` puts beside the backend's files.

        Waits for the save before it, then for the copy only, or, where there is no room for one and for the
        `last` save of a stage, until the checkpoint is in place. Raises StorageError if the disk refuses the
        last one twice; CheckpointError for a step that is saved.
        """
        started = time.perf_counter()
        check_json("state", state)
        write = partial(self._write, step, json.loads(encode_json(state)), write_more)
        await self._idle.wait()
        held: HeldCopy | None = None if last else await self._backend.capture().result()
        if held is None:
            await self._save_now(write, last=last)
        else:
            self._idle = trio.Event()
            self._nursery.start_soon(self._save_beside, write, held, self._idle)
        held_up_s = time.perf_counter() - started
        self._statistics["held_up_s"] += held_up_s
        if self._spans is not None:
            self._spans.add("checkpoint", TRAINER, held_up_s, held_up_s)

    async def is_saved(self, step: int) -> bool:
        """Whether the checkpoint of `step` is in place, once no save is at work; of step 0, which is none, it
        always is.
        """
        await self._idle.wait()
        return step == 0 or await trio.to_thread.run_sync(
            is_complete, self._run_dir.checkpoint(self._stage, step)
        )

    async def wait_written(self) -> None:
        """Returns when no save is at work."""
        await self._idle.wait()

    def take_metrics(self) -> dict[str, float]:
        """For the next row: how many saves failed since this was last asked; nothing if none did."""
        failed = self._statistics["failed"] - self._failed_before_row
        self._failed_before_row += failed
        return {"checkpoint/failed": failed} if failed else {}

    def statistics(self) -> Mapping[str, float]:
        """Saves that are in place and that failed, how many of them beside training, seconds training waited,
        seconds the last write took.
        """
        return dict(self._statistics)

    def warn_if_tight(self) -> None:
        """Warns when the disk has no room for two checkpoints: the next is written before the last one may
        go.
        """
        root = self._run_dir.root.absolute()
        folder = next(path for path in (root, *root.parents) if path.is_dir())
        free, needed = shutil.disk_usage(folder).free, 2 * self._expected_bytes()
        if free < needed:
            self._warn(
                f"warning: {folder} has {format_bytes(free)} free and two checkpoints of this model take"
                f" {format_bytes(needed)}; a save that finds no room fails and training goes on: free space,"
                " or name another directory with --output.dir DIR"
            )

    def _expected_bytes(self) -> int:
        return self._backend.state_bytes() + DISK_MARGIN_BYTES

    async def _save_now(self, write: Callable[[WriteModel], Awaitable[None]], *, last: bool) -> None:
        async def write_model(path: Path) -> None:
            await self._backend.save(path).result()

        for tries_left in (1, 0) if last else (0,):
            try:
                await write(write_model)
                return
            except StorageError as error:
                await self._backend.reset().result()  # it takes a save that failed for a failed step
                self._note_failure(error, "; once more" if tries_left else "")
                if last and not tries_left:
                    raise

    async def _save_beside(
        self, write: Callable[[WriteModel], Awaitable[None]], held: HeldCopy, done: trio.Event
    ) -> None:
        with trio.CancelScope(shield=True):  # it ends by itself: threads that write files
            try:
                await write(held)
                self._statistics["beside_training"] += 1
            except StorageError as error:
                self._note_failure(error, "; training goes on and the next checkpoint is saved as usual")
            finally:
                done.set()
                held.drop()

    async def _write(
        self,
        step: int,
        state: Mapping[str, JSONValue],
        write_more: WriteModel | None,
        write_model: WriteModel,
    ) -> None:
        started = time.perf_counter()
        await save_checkpoint(
            self._run_dir.checkpoint(self._stage, step),
            write_model=write_in_turn(write_model, write_more),
            state=state,
            stage=self._stage,
            step=step,
            config_hash=self._config_hash,
            expected_bytes=self._expected_bytes(),
        )
        write_s = self._statistics["write_s"] = time.perf_counter() - started
        if self._spans is not None:
            self._spans.add("checkpoint_write", CHECKPOINTS, write_s, write_s)
        self._statistics["saved"] += 1
        await trio.to_thread.run_sync(retain, self._run_dir, self._stage, self._keep, self._warn)

    def _note_failure(self, error: StorageError, then: str) -> None:
        self._statistics["failed"] += 1
        self._warn(f"warning: checkpoint not saved: {error}{then}")


def write_in_turn(first: WriteModel, second: WriteModel | None) -> WriteModel:
    """What writes both into one directory."""
    if second is None:
        return first

    async def write(path: Path) -> None:
        await first(path)
        await second(path)

    return write


@asynccontextmanager
async def open_checkpoint_writer(
    backend: SavingBackend,
    run_dir: RunDir,
    stage: str,
    *,
    config_hash: str | None = None,
    keep: Keep = Keep(),
    warn: Callable[[str], object],
    spans: SpanRecorder | None = None,
) -> AsyncIterator[CheckpointWriter]:
    """Saves of `stage` for as long as the context is open, one at a time; the backend must stay open for
    longer.

    `warn` takes a line about what failed and training outlives. `spans` records how long each save held
    training up, and how long it was written.
    """
    async with trio.open_nursery() as nursery:
        writer = CheckpointWriter(nursery, backend, run_dir, stage, config_hash, keep, warn, spans)
        writer.warn_if_tight()
        yield writer
