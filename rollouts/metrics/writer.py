"""The metrics logger of a run: what happened, as lines of the files of a run directory, which are the truth
that everything else reads.

    log_step ──────► metrics.jsonl            one row a step
               ├───► tokens/, contributions.jsonl, updates.log     what went into each update of the weights
               └───► spans.jsonl              when work was done
    log_samples ───► samples.jsonl            up to samples_per_step rows a step
    log_evaluation ► evaluations.jsonl        one row an evaluation
    log_spans ─────► spans.jsonl              of work that belongs to no step that is still to come

A call is one write of whole lines for each file, made by a thread while the event loop goes on, one call
after the other. When it returns, what was logged survives the death of the process (not a power cut: the
files are flushed to the device when the logger closes). A call that has begun writes all the same when its
caller is cancelled. Rows of an earlier attempt are never touched; readers take the highest attempt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from rollouts.crash_points import reach
from rollouts.errors import StorageError
from rollouts.metrics.contributions import Place, UpdateRecord, encode_contributions, format_update
from rollouts.metrics.progress import Progress
from rollouts.metrics.record import encode_rows, make_head, make_row
from rollouts.metrics.record_files import PART_BYTES, UPDATES, RecordFiles
from rollouts.metrics.sample_rows import encode_sample_rows, select_evenly
from rollouts.metrics.spans import Span
from rollouts.metrics.token_shards import TokenShards, encode_blocks
from rollouts.run_dir import RunDir
from rollouts.types import Sample

Row = dict[str, Any]
TakeTurn = Callable[[Callable[[], object]], Awaitable[None]]


class JsonlLogger:
    """A MetricsLogger that writes a run's files and, when given one, tells a Progress about each step. Made
    by open_jsonl_logger.
    """

    def __init__(
        self,
        files: RecordFiles,
        take_turn: TakeTurn,
        *,
        attempt: int,
        samples_per_step: int,
        shards: TokenShards | None,
        progress: Progress | None,
        time_unix: Callable[[], float],
    ) -> None:
        self._files = files
        self._take_turn = take_turn
        self._attempt = attempt
        self._samples_per_step = samples_per_step
        self._shards = shards
        self._progress = progress
        self._time_unix = time_unix
        self._refused_arrays = False  # whether that was said
        self._counts: Counter[str] = Counter()  # rows written, by file

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Mapping[str, float],
        *,
        updates: Sequence[UpdateRecord] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        """Appends what went into the step's updates, the row of the step, and a row for each span.

        Of an update: arrays where they are kept, then the rows that name them, then a line. Arrays that the
        disk refuses are left out, which is said once; rows and lines wait. Raises MetricError, before
        anything is written, for a metric's name or value that may not be written.
        """
        head = self._make_head(stage, step, policy_version)
        row = make_row(head, metrics)

        def write() -> None:
            lengths = [update.batch.response_lengths for update in updates]
            for update, own in zip(updates, lengths, strict=True):
                places = self._write_arrays(stage, update)
                self._append("contributions", encode_contributions(head, update, own, places))
            lines = (format_update(head, *pair) for pair in zip(updates, lengths, strict=True))
            self._files.append(UPDATES, "".join(f"{line}\n" for line in lines).encode())
            self._append("metrics", encode_rows([row]))
            self._append_spans(head, spans)

        reach("metrics.before_row")
        await self._take_turn(write)
        reach("metrics.after_row")
        if self._progress is not None:
            self._progress.update(stage, step, metrics)
        await trio.lowlevel.checkpoint_if_cancelled()

    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None:
        """Appends up to samples_per_step of the samples, evenly spaced, so that every group has a chance to
        be seen.
        """
        chosen = [samples[index] for index in select_evenly(len(samples), self._samples_per_step)]
        head = self._make_head(stage, step, policy_version)
        reach("metrics.before_samples")
        await self._take_turn(lambda: self._append("samples", encode_sample_rows(head, chosen)))
        reach("metrics.after_samples")
        await trio.lowlevel.checkpoint_if_cancelled()

    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]
    ) -> None:
        """Appends the row of an evaluation called `name`. Raises MetricError like log_step."""
        row = make_row({**self._make_head(stage, step, policy_version), "name": name}, metrics)
        reach("metrics.before_evaluation")
        await self._take_turn(lambda: self._append("evaluations", encode_rows([row])))
        reach("metrics.after_evaluation")
        await trio.lowlevel.checkpoint_if_cancelled()

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        """Appends a row for each span."""
        head = self._make_head(stage, step, policy_version)
        await self._take_turn(lambda: self._append_spans(head, spans))
        await trio.lowlevel.checkpoint_if_cancelled()

    def statistics(self) -> Mapping[str, float]:
        """Rows written by this attempt, by file, and how many bytes of torn lines were cut off when the files
        were opened.
        """
        return {**self._counts, "repaired_bytes": self._files.repaired_bytes}

    def _make_head(self, stage: str, step: int, policy_version: int) -> Row:
        return make_head(stage, step, policy_version, self._attempt, self._time_unix())

    def _append(self, name: str, lines: bytes) -> None:
        self._files.append(name, lines)
        self._counts[name] += lines.count(b"\n")

    def _append_spans(self, head: Row, spans: Sequence[Span]) -> None:
        if spans:
            self._append("spans", encode_rows([span.fields() for span in spans], head=head))

    def _write_arrays(self, stage: str, update: UpdateRecord) -> Sequence[Place]:
        """Where the arrays of each row of the update lie; empty where none are kept."""
        if self._shards is None or not update.contributes:
            return ()
        try:
            places = self._shards.write(stage, encode_blocks(update))
        except StorageError as error:
            if not self._refused_arrays:
                logging.getLogger("rollouts").warning(
                    "warning: %s; the arrays of these steps are left out", error
                )
            self._refused_arrays = True
            return ()
        self._refused_arrays = False
        return places


@asynccontextmanager
async def open_jsonl_logger(
    run_dir: RunDir,
    *,
    attempt: int,
    samples_per_step: int,
    token_arrays_bytes: int = 0,
    progress: Progress | None = None,
    time_unix: Callable[[], float] = time.time,
    part_bytes: int = PART_BYTES,
    in_thread: bool = True,
) -> AsyncIterator[JsonlLogger]:
    """A logger on the files of `run_dir`, made if missing and repaired if torn; flushed to the device on the
    way out.

    token_arrays_bytes: of per-token arrays that are kept, 0 for none. in_thread: False where a thread may not
    be waited for, as under a mock clock; the event loop then waits for the disk.
    """
    limits = (samples_per_step, token_arrays_bytes)
    assert attempt >= 1 and min(limits) >= 0, (attempt, limits)
    limiter = trio.CapacityLimiter(1)  # its queue is first come, first served

    async def take_turn(work: Callable[[], object]) -> None:
        """Does what blocks on a disk, one call after the other, to its end though the caller is cancelled."""
        with trio.CancelScope(shield=True):
            if in_thread:
                await trio.to_thread.run_sync(work, limiter=limiter)
            else:
                await trio.lowlevel.checkpoint()
                work()

    async with AsyncExitStack() as stack:
        opened: list[RecordFiles] = []
        await take_turn(lambda: opened.append(RecordFiles(run_dir, part_bytes=part_bytes)))
        stack.push_async_callback(take_turn, opened[0].close)
        shards: TokenShards | None = None
        if token_arrays_bytes:
            shards = TokenShards(run_dir, attempt=attempt, limit_bytes=token_arrays_bytes)
            stack.push_async_callback(take_turn, shards.close)
        yield JsonlLogger(
            opened[0],
            take_turn,
            attempt=attempt,
            samples_per_step=samples_per_step,
            shards=shards,
            progress=progress,
            time_unix=time_unix,
        )
