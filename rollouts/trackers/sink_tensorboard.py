"""TensorBoard: event files in RUN/trackers/tensorboard/STAGE, which `tensorboard --logdir
RUN/trackers/tensorboard` shows as one run a stage.

A row is one event, of the row's time, step and metrics, so the same rows give the same bytes. The mark is how
long each file was: what a killed follower wrote beyond it is cut off before it is written again, so no row is
there twice.

Steps that a resumed run repeats: the first of them begins a session, at which TensorBoard forgets what it had
from that step on. It shows the newest attempt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from rollouts.errors import SinkUnavailable
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow

FIRST_EVENT = "brain.Event:2"  # what a file of this format begins with


def open_sink(run: RunInfo) -> TensorBoardSink:
    """The sink of a run. Raises SinkUnavailable where its files cannot be written."""
    return TensorBoardSink(run.root / "trackers" / "tensorboard", run)


class TensorBoardSink:
    """Appends to the newest event file of each stage."""

    def __init__(self, root: Path, run: RunInfo) -> None:
        self._root = root
        self._owner = run.id[:8]
        mark = run.mark or {}
        self._sizes: dict[str, int] = dict(mark.get("sizes", {}))  # by path below root
        self._files: dict[str, str] = dict(mark.get("files", {}))  # the newest of each stage
        self._attempts: dict[str, int] = dict(mark.get("attempts", {}))  # the newest of each stage
        try:
            self._cut()
        except OSError as error:
            raise SinkUnavailable(f"{root} cannot be written ({error})") from error

    def send(self, rows: Sequence[TrackedRow]) -> Mark:
        """Appends the rows. Raises SinkUnavailable for a disk that refuses; the mark then cuts off what it
        took.
        """
        try:
            for tracked in rows:
                self._write(tracked)
        except OSError as error:
            raise SinkUnavailable(f"{self._root} cannot be written ({error})") from error
        return {"sizes": dict(self._sizes), "files": dict(self._files), "attempts": dict(self._attempts)}

    def close(self) -> None:
        """Nothing is held open between rows."""

    def _cut(self) -> None:
        """Makes the files what the mark says: longer ones were written by a follower that died before it
        stored that it had. A file whose end is lost, as after a power cut, is read no further by TensorBoard:
        another goes on.
        """
        for path in self._root.glob(f"*/events.out.tfevents.*.{self._owner}.*"):
            known = self._sizes.get(path.relative_to(self._root).as_posix())
            if known is None:
                path.unlink()
            elif path.stat().st_size > known:
                os.truncate(path, known)
        for stage, name in list(self._files.items()):
            path = self._root / name
            if not path.exists() or path.stat().st_size < self._sizes[name]:
                del self._files[stage]

    def _write(self, tracked: TrackedRow) -> None:
        row, stage = tracked.row, str(tracked.row["stage"])
        head = {"wall_time": row["time_unix"], "step": row["step"]}
        events = [make_event(row["time_unix"], row["step"], tracked.metrics())]
        if tracked.file == "metrics":
            if row["attempt"] > self._attempts.get(stage, row["attempt"]):
                events.insert(0, Event(**head, session_log=SessionLog(status=SessionLog.START)))
            self._attempts[stage] = max(row["attempt"], self._attempts.get(stage, 0))
        if stage not in self._files:
            self._files[stage] = self._choose_file(stage, row["time_unix"])
            events.insert(0, Event(wall_time=row["time_unix"], file_version=FIRST_EVENT))
        name = self._files[stage]
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
            file.flush()
            self._sizes[name] = file.tell()

    def _choose_file(self, stage: str, time_unix: float) -> str:
        """A name that sorts after those of the earlier files: TensorBoard reads them in that order."""
        folder = re.sub(r"[^A-Za-z0-9_.-]", "_", stage)
        earlier = sum(name.startswith(f"{folder}/") for name in self._sizes)
        return f"{folder}/events.out.tfevents.{int(time_unix):010d}.{self._owner}.{earlier}"


def make_event(time_unix: float, step: int, metrics: Mapping[str, float]) -> Event:
    """A row as one event."""
    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    return Event(wall_time=time_unix, step=step, summary=Summary(value=values))
