"""Saving while training goes on: a step's state is copied, then written and proven meanwhile; what retention
does not keep goes.

    save(step) ─ waits for the save before it ─► copy, on the device thread ─► returns: training goes on
                                                      └─► a task: write, hash, sync, read back, name, retain
    no memory for a copy, or the last save of a stage: save() returns when the checkpoint is in place
    the disk refuses: the old checkpoints stay, a warning, checkpoint/failed in the next row, the next save as
                      usual; the last save is tried twice and then raises StorageError

Leaving the context waits for the save at work, also when an exception or a cancellation leaves it.
"""

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import trio

from rollouts.checkpoints.load import is_complete
from rollouts.checkpoints.retention import apply_retention, read_scores
from rollouts.checkpoints.save import WriteModel, format_bytes, save_checkpoint
from rollouts.errors import RolloutsError, StorageError
from rollouts.metrics.spans import CHECKPOINTS, SpanRecorder
from rollouts.protocols import Say, TrainFuture, TrainingBackend
from rollouts.run_dir import RunDir
from rollouts.types import JSONObject, Numbers, check_json, encode_json, live

# of a checkpoint besides tensors, and room for the rows that are written meanwhile
DISK_MARGIN_BYTES = 1 << 20
Writes = Sequence[tuple[str, WriteModel]]
"""What writes into a checkpoint, with the folder of it into which each does; "": the checkpoint itself."""


class SavingBackend(TrainingBackend, Protocol):
    """A TrainingBackend that can be saved while it trains."""

    def state_bytes(self) -> int:
        """What capture() holds and save() writes, in bytes."""
        ...

    def capture(self) -> TrainFuture[Any]:
        """What save() would write now; None: there is no room for it. Awaiting what it is called with, a
        directory, writes it, once, while steps run; `drop()` frees it at once, if it was not written.
        """
        ...


class Keep(NamedTuple):
    """What stays of a stage's checkpoints."""

    last: int = 0  # newest ones; 0: all
    best_by: str | None = None  # a metric in evaluations.jsonl; the one with the highest stays too


def retain(run_dir: RunDir, stage: str, keep: Keep, warn: Say) -> None:
    """Removes the checkpoints of a stage that need not stay. After every save, and at a resume: a run may
    have been killed between the two.

    Blocking: run it in a thread. What cannot be removed is warned of, and stays.
    """
    if not keep.last:
        return
    scores = {}
    try:
        if keep.best_by:
            scores = read_scores(run_dir, stage, keep.best_by, lambda line: warn(f"warning: {line}"))
        apply_retention(run_dir.stage_checkpoints(stage), keep.last, scores)
    except (OSError, RolloutsError) as error:  # of rows, or of checkpoints: too many are no loss
        warn(f"warning: old checkpoints could not be removed and take up space: {error}")


@live
class CheckpointWriter:
    """Saves the checkpoints of one stage. Made by open_checkpoint_writer."""

    nursery: trio.Nursery
    backends: Mapping[str, SavingBackend]
    run_dir: RunDir
    stage: str
    config_hash: str | None
    keep: Keep
    warn: Say
    spans: SpanRecorder
    _written: trio.Event | None = None  # of the newest save beside training
    _failed: int = 0  # saves, since the last row

    async def save(
        self,
        step: int,
        state: JSONObject,
        *,
        last: bool = False,
        write_more: Writes = (),
    ) -> None:
        """Saves `step`, completed and idle, with the loop's `state`, which is read before training goes on,
        and what `write_more` puts beside the backends' files.

        Waits for the save before it, then for the copy only, or, where there is no room for one and for the
        `last` save of a stage, until the checkpoint is in place. Raises StorageError if the disk refuses the
        last one twice; CheckpointError for a step that is saved.
        """
        with self.spans.measure("checkpoint"), ExitStack() as copies:
            check_json("state", state)
            write = partial(self._write, step, json.loads(encode_json(state)), write_more)
            await self.wait_written()
            held = None if last else await self._capture(copies)
            if held is None:
                copies.close()
                await self._save_now(write, last=last)
                return
            kept, written = copies.pop_all(), trio.Event()
            self._written = written

            async def save_beside() -> None:
                with trio.CancelScope(shield=True), kept:  # it ends by itself: threads that write files
                    try:
                        await write(held)
                    except StorageError as error:
                        then = "; training goes on and the next checkpoint is saved as usual"
                        self._note_failure(error, then)
                    finally:
                        written.set()

            self.nursery.start_soon(save_beside)

    async def is_saved(self, step: int) -> bool:
        """Whether the checkpoint of `step` is in place, once no save is at work; of step 0, which is none, it
        always is.
        """
        await self.wait_written()
        return step == 0 or await trio.to_thread.run_sync(
            is_complete, self.run_dir.checkpoint(self.stage, step)
        )

    async def wait_written(self) -> None:
        """Returns when no save is at work."""
        if self._written is not None:
            await self._written.wait()

    def take_metrics(self) -> Numbers:
        """For the next row: how many saves failed since this was last asked; nothing if none did."""
        failed, self._failed = self._failed, 0
        return {"checkpoint/failed": failed} if failed else {}

    def expected_bytes(self) -> int:
        """What a checkpoint takes on disk, at most."""
        return sum(backend.state_bytes() for backend in self.backends.values()) + DISK_MARGIN_BYTES

    async def _capture(self, copies: ExitStack) -> Writes | None:
        """What writes a copy of each backend, which `copies` frees; None if there is no room for one."""
        writes = []
        for folder, backend in self.backends.items():
            held = await backend.capture().result()
            if held is None:
                return None
            copies.callback(held.drop)
            writes.append((folder, held))
        return writes

    async def _save_now(self, write: Callable[[Writes], Awaitable[None]], *, last: bool) -> None:
        writes = [
            (folder, lambda path, backend=backend: backend.save(path).result())
            for folder, backend in self.backends.items()
        ]
        for tries_left in (1, 0) if last else (0,):
            try:
                await write(writes)
                return
            except StorageError as error:
                for backend in self.backends.values():
                    await backend.reset().result()  # it takes a save that failed for a failed step
                self._note_failure(error, "; once more" if tries_left else "")
                if last and not tries_left:
                    raise

    async def _write(
        self,
        step: int,
        state: JSONObject,
        write_more: Writes,
        writes: Writes,
    ) -> None:
        async def write_model(path: Path) -> None:
            for folder, write in (*writes, *write_more):
                (path / folder).mkdir(exist_ok=True)
                await write(path / folder)

        with self.spans.measure("checkpoint_write", CHECKPOINTS):
            await save_checkpoint(
                self.run_dir.checkpoint(self.stage, step),
                write_model=write_model,
                state=state,
                stage=self.stage,
                step=step,
                config_hash=self.config_hash,
                expected_bytes=self.expected_bytes(),
            )
        await trio.to_thread.run_sync(retain, self.run_dir, self.stage, self.keep, self.warn)

    def _note_failure(self, error: StorageError, then: str) -> None:
        self._failed += 1
        self.warn(f"warning: checkpoint not saved: {error}{then}")


@asynccontextmanager
async def open_checkpoint_writer(
    backends: Mapping[str, SavingBackend],
    run_dir: RunDir,
    stage: str,
    *,
    config_hash: str | None = None,
    keep: Keep,
    warn: Say,
    spans: SpanRecorder | None = None,
) -> AsyncIterator[CheckpointWriter]:
    """Saves of `stage` for as long as the context is open, one at a time; the backends must stay open for
    longer. `backends`: by the folder of a checkpoint in which each lies; "" is the checkpoint itself.

    `warn` takes a line about what failed and training outlives. `spans` records how long each save held
    training up, and how long it was written. Warns when the disk has no room for two checkpoints: the next is
    written before the last one may go.
    """
    async with trio.open_nursery() as nursery:
        writer = CheckpointWriter(
            nursery, backends, run_dir, stage, config_hash, keep, warn, spans or SpanRecorder()
        )
        root = run_dir.root.absolute()
        folder = next(path for path in (root, *root.parents) if path.is_dir())
        free, needed = shutil.disk_usage(folder).free, 2 * writer.expected_bytes()
        if free < needed:
            warn(
                f"warning: {folder} has {format_bytes(free)} free and two checkpoints of this model take"
                f" {format_bytes(needed)}; a save that finds no room fails and training goes on: free space,"
                " or name another directory with --output.dir DIR"
            )
        yield writer
