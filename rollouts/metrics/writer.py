"""The metrics logger of a run: what happened, as lines of the files of a run directory, which are the truth
that everything else reads.

    log_step ──────► metrics.jsonl            one row a step
               ├───► tokens/, contributions.jsonl, updates.log     what went into each update of the weights
               └───► spans.jsonl              when work was done
    log_samples ───► samples.jsonl            up to samples_per_step trajectories a step
    log_evaluation ► evaluations.jsonl        one row an evaluation
    log_spans ─────► spans.jsonl              of work that belongs to no step that is still to come

A call is one write of whole lines for each file, made by a thread while the event loop goes on, one call
after the other. When it returns, what was logged survives the death of the process (not a power cut: the
files are flushed to the device when the logger closes). A call that has begun writes all the same when its
caller is cancelled. Rows of an earlier attempt are never touched; readers take the highest attempt.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio

from rollouts.crash_points import reach
from rollouts.errors import RecordLost, RunDirError
from rollouts.metrics.jsonl import RecordFile
from rollouts.metrics.progress import Progress
from rollouts.metrics.record import (
    encode_rows,
    encode_sample_rows,
    make_head,
    make_row,
    select_evenly,
)
from rollouts.metrics.spans import Span, SpanRecorder
from rollouts.metrics.token_shards import (
    TIME_FORM,
    TokenShards,
    UpdateRecord,
    encode_contributions,
    format_update,
)
from rollouts.run_dir import RunDir
from rollouts.types import Fields, Numbers, Sample, split_trajectories


@dataclass(kw_only=True)
class JsonlLogger:
    """A MetricsLogger that writes a run's files and tells a Progress of each step. See open_jsonl_logger."""

    attempt: int
    samples_per_step: int
    progress: Progress
    shards: TokenShards
    files: dict[str, RecordFile]  # by the stem of their name
    measure: Callable[[], Numbers]  # what is measured beside the steps, since the last row
    turn: trio.CapacityLimiter  # its queue is first come, first served
    # of what goes on beside the loops: the row of each step has it, of samples those that are logged
    recorder: SpanRecorder = field(default_factory=SpanRecorder)

    async def log_step(
        self,
        stage: str,
        step: int,
        policy_version: int,
        metrics: Numbers,
        *,
        updates: Sequence[UpdateRecord] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        """Appends what went into the step's updates, the row of the step, and a row for each span.

        Of an update: arrays where they are kept, then the rows that name them, then a line. Arrays that the
        disk refuses are left out, which is said once; rows and lines wait. Raises MetricError, before
        anything is written, for a metric's name or value that may not be written.
        """
        head = self._head(stage, step, policy_version)
        row = make_row(head, {**metrics, **self.measure()})
        spans = [*spans, *self.recorder.take()]

        def write() -> None:
            for update in updates:
                places = self.shards.write(stage, update) if update.contributes else {}
                self.files["contributions"].append(encode_contributions(head, update, places))
                self.files["updates"].append(f"{format_update(head, update)}\n".encode())
            self.files["metrics"].append(encode_rows([row]))
            self._append_spans(head, spans)

        reach("metrics.before_row")
        await self._append(write)
        reach("metrics.after_row")
        self.progress(stage, step, metrics)

    async def log_samples(
        self, stage: str, step: int, policy_version: int, samples: Sequence[Sample]
    ) -> None:
        """Appends up to samples_per_step of the trajectories, evenly spaced, so that every group has a chance
        to be seen: of each all segments, one after the other.
        """
        trajectories = split_trajectories(samples)
        places = select_evenly(len(trajectories), self.samples_per_step)
        chosen = [sample for place in places for sample in trajectories[place]]
        self.recorder.keep((sample.id for sample in chosen), rest=(sample.id for sample in samples))
        head = self._head(stage, step, policy_version)
        reach("metrics.before_samples")
        await self._append(lambda: self.files["samples"].append(encode_sample_rows(head, chosen)))
        reach("metrics.after_samples")

    async def log_evaluation(
        self, stage: str, step: int, policy_version: int, name: str, metrics: Numbers
    ) -> None:
        """Appends the row of an evaluation called `name`. Raises MetricError like log_step."""
        row = make_row({**self._head(stage, step, policy_version), "name": name}, metrics)
        reach("metrics.before_evaluation")
        await self._append(lambda: self.files["evaluations"].append(encode_rows([row])))
        reach("metrics.after_evaluation")

    async def log_words(self, stage: str, step: int, words: str) -> None:
        """Appends a line to updates.log, of what is no update."""
        line = f"{time.strftime(TIME_FORM, time.gmtime())}  {stage} step {step}: {words}\n"
        await self._append(lambda: self.files["updates"].append(line.encode()))

    async def log_spans(self, stage: str, step: int, policy_version: int, spans: Sequence[Span]) -> None:
        """Appends a row for each span."""
        head = self._head(stage, step, policy_version)
        await self._append(lambda: self._append_spans(head, spans))

    def check_kept(self) -> None:
        """Raises RecordLost where somebody has taken rows away."""
        for file in self.files.values():
            if file.lost:
                raise RecordLost(file.lost)

    def _head(self, stage: str, step: int, policy_version: int) -> Fields:
        return make_head(stage, step, policy_version, self.attempt, time.time())

    async def _append(self, write: Callable[[], None]) -> None:
        await self.take_turn(write)
        await trio.lowlevel.checkpoint_if_cancelled()

    async def take_turn(self, work: Callable[[], None]) -> None:
        """Does what blocks on a disk, one call after the other, to its end though the caller is cancelled."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(work, limiter=self.turn)

    def _append_spans(self, head: Fields, spans: Sequence[Span]) -> None:
        self.files["spans"].append(encode_rows([{**head, **span.fields()} for span in spans]))


@asynccontextmanager
async def open_jsonl_logger(
    run_dir: RunDir,
    *,
    attempt: int,
    samples_per_step: int,
    token_arrays_bytes: int = 0,
    keep_parts: int = 0,
    progress: Progress = lambda stage, step, metrics: None,
    measure: Callable[[], Numbers] = dict,
) -> AsyncIterator[JsonlLogger]:
    """A logger on the files of `run_dir`, made if missing and repaired if torn; flushed to the device on the
    way out.

    token_arrays_bytes: of per-token arrays that are kept, 0 for none. keep_parts: of samples, contributions
    and spans, 0 for all. measure: called once a step, gives
    metrics that are added to its row.
    """
    logger = JsonlLogger(
        attempt=attempt,
        samples_per_step=samples_per_step,
        progress=progress,
        measure=measure,
        shards=TokenShards(run_dir, attempt=attempt, limit_bytes=token_arrays_bytes),
        files={},
        turn=trio.CapacityLimiter(1),
    )
    closing = ExitStack()

    def open_all() -> None:
        logger.files = open_files(run_dir, keep_parts=keep_parts)
        for file in (*logger.files.values(), logger.shards):
            closing.callback(file.close)

    await logger.take_turn(open_all)
    try:
        yield logger
    finally:
        await logger.take_turn(closing.close)


def open_files(run_dir: RunDir, *, keep_parts: int = 0) -> dict[str, RecordFile]:
    """The files of a run by the stem of their name; the first three are made at once, the others with their
    first row. Raises RunDirError where the directory or a file cannot be made or written.
    """
    large = run_dir.samples, run_dir.contributions, run_dir.spans
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True)
        for path in run_dir.row_files[:3]:
            path.touch()
        return {
            path.stem: RecordFile(path, keep=keep_parts * (path in large))
            for path in (*run_dir.row_files, run_dir.updates_log)
        }
    except OSError as error:
        raise RunDirError(
            f"the record cannot be written ({error}); mend that, or name another directory with --output.dir"
        ) from error
