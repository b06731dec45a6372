"""A follower without its process: a sink that fails as it is told, and a control of which the run is over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollouts.trackers.sinks import Mark, SinkKind, TrackedRow
from rollouts.trackers.worker import Control, Following

FILES = ("metrics", "evaluations")


class FakeControl(Control):
    """The run is over from the start; waits take no time and are kept."""

    def __init__(self) -> None:
        self.over = True
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        if seconds:
            self.waits.append(seconds)


class FakeSink:
    """Keeps what it takes; raises what `faults` has for each send, before or (as a lost answer) after it took
    the rows.
    """

    def __init__(
        self, store: list[TrackedRow], faults: list[Exception | None], *, after: bool = False
    ) -> None:
        self.store, self.faults, self.after = store, faults, after

    def send(self, rows: Sequence[TrackedRow]) -> Mark | None:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and not self.after:
            raise fault
        self.store += rows
        if fault is not None:
            raise fault
        return {"rows": len(self.store)}

    def close(self) -> None:
        return


def make_following(
    root: Path, sink: FakeSink, said: list[str], *, batch_rows: int = 3, confirms_at_close: bool = False
) -> Following:
    kind = SinkKind("", FILES, deadline_s=30.0, batch_rows=batch_rows, confirms_at_close=confirms_at_close)
    return Following(root, "fake", kind, lambda run: sink, said.append)


def steps(rows: Sequence[TrackedRow]) -> list[object]:
    return [row.row["step"] for row in rows]
