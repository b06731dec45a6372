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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio

from rollouts.crash_points import reach
from rollouts.errors import StorageError
from rollouts.metrics.contributions import Place, UpdateRecord, encode_contributions, format_update
from rollouts.metrics.progress import Progress
from rollouts.metrics.record import encode_rows, make_head, make_row
from rollouts.metrics.record_files import PART_BYTES, UPDATES, RecordFiles, join_lines
from rollouts.metrics.sample_rows import encode_sample_rows, select_evenly
from rollouts.metrics.spans import Span
from rollouts.metrics.token_shards import TokenShards, encode_blocks
from rollouts.run_dir import RunDir
from rollouts.types import Sample

Result = TypeVar("Result")
Row = dict[str, Any]


class JsonlLogger:
    """A MetricsLogger that writes a run's files and, when given one, tells a Progress about each step. Made
    by open_jsonl_logger.
    """

    def __init__(
        self,
        files: RecordFiles,
        turns: Turns,
        *,
        attempt: int,
        samples_per_step: int,
        shards: TokenShards | None,
        progress: Progress | None,
        time_unix: Callable[[], float],
    ) -> None:
        self._files = files
        self._turns = turns
        self._attempt = attempt
        self._samples_per_step = samples_per_step
        self._shards = shards
        self._progress = progress
        self._time_unix = time_unix
        self._refused_arrays = False  # whether that was said
        self._counts = {
            "rows": 0,
            "sample_rows": 0,
            "evaluation_rows": 0,
            "contribution_rows": 0,
            "span_rows": 0,
            "updates": 0,
        }

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
        reach("metrics.before_row")
        self._counts["contribution_rows"] += await self._turns.take(
            lambda: self._write_step(head, row, updates, spans)
        )
        reach("metrics.after_row")
        self._counts["rows"] += 1
        self._counts["updates"] += len(updates)
        self._counts["span_rows"] += len(spans)
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
        reach("metrics.before_samples")
        if chosen:
            head = self._make_head(stage, step, policy_version)
            await self._turns.take(lambda: self._files.append("samples", encode_sample_rows(head, chosen)))
        reach("metrics.after_samples")
        self._counts["sample_rows"] += len(chosen)
        await trio.lowlevel.checkpoint_if_cancelled()

    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Mapping[str, float]
    ) -> None:
        """Appends the row of an evaluation called `name`. Raises MetricError like log_step."""
        row = make_row({**self._make_head(stage, step, policy_version), "name": name}, metrics)
        reach("metrics.before_evaluation")
        await self._turns.take(lambda: self._append("evaluations", [row]))
        reach("metrics.after_evaluation")
        self._counts["evaluation_rows"] += 1
        await trio.lowlevel.checkpoint_if_cancelled()

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        """Appends a row for each span."""
        head = self._make_head(stage, step, policy_version)
        if spans:
            await self._turns.take(lambda: self._append("spans", [span.fields() for span in spans], head))
        self._counts["span_rows"] += len(spans)
        await trio.lowlevel.checkpoint_if_cancelled()

    def statistics(self) -> Mapping[str, float]:
        """Rows written by this attempt, and how many bytes of torn lines were cut off when the files were
        opened.
        """
        return {**self._counts, "repaired_bytes": self._files.repaired_bytes}

    def _make_head(self, stage: str, step: int, policy_version: int) -> Row:
        return make_head(stage, step, policy_version, self._attempt, self._time_unix())

    def _append(self, name: str, rows: Sequence[Row], head: Row | None = None) -> None:
        self._files.append(name, encode_rows(rows, head=head))

    def _write_step(self, head: Row, row: Row, updates: Sequence[UpdateRecord], spans: Sequence[Span]) -> int:
        """The number of rows of contributions."""
        if updates:
            lengths = [update.batch.response_lengths for update in updates]
            pairs = list(zip(updates, lengths, strict=True))
            rows = [
                encode_contributions(head, update, of, self._write_arrays(head["stage"], update))
                for update, of in pairs
            ]
            self._files.append("contributions", b"".join(rows))
            self._files.append(UPDATES, join_lines(format_update(head, *pair).encode() for pair in pairs))
        self._append("metrics", [row])
        if spans:
            self._append("spans", [span.fields() for span in spans], head)
        return sum(len(update.batch) for update in updates if update.contributes)

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


class Turns:
    """Runs what blocks on a disk, one call after the other in the order in which they were asked for, in a
    thread.
    """

    def __init__(self, *, in_thread: bool) -> None:
        self._in_thread = in_thread
        self._limiter = trio.CapacityLimiter(1)  # its queue is first come, first served

    async def take(self, work: Callable[[], Result]) -> Result:
        """What `work` returns. It is done to its end also when the caller is cancelled."""
        if not self._in_thread:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return work()
        results: list[Result] = []
        with trio.CancelScope(shield=True):
            results.append(await trio.to_thread.run_sync(work, limiter=self._limiter))
        return results[0]


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
    assert attempt >= 1 and samples_per_step >= 0 and token_arrays_bytes >= 0, (
        attempt,
        samples_per_step,
        token_arrays_bytes,
    )
    turns = Turns(in_thread=in_thread)
    files = await turns.take(lambda: RecordFiles(run_dir, part_bytes=part_bytes))
    shards = (
        TokenShards(run_dir, attempt=attempt, limit_bytes=token_arrays_bytes) if token_arrays_bytes else None
    )
    logger = JsonlLogger(
        files,
        turns,
        attempt=attempt,
        samples_per_step=samples_per_step,
        shards=shards,
        progress=progress,
        time_unix=time_unix,
    )
    try:
        yield logger
    finally:
        await turns.take(lambda: close_files(files, shards))


def close_files(files: RecordFiles, shards: TokenShards | None) -> None:
    """Flushes and closes all of them. Raises StorageError if rows are lost."""
    try:
        files.close()
    finally:
        if shards is not None:
            shards.close()
