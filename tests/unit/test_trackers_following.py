"""One follower of a run: what is sent, once or again, and what failures and refusals of a service cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable
from rollouts.trackers import follower
from rollouts.trackers.follower import Follower
from rollouts.trackers.position import open_position, position_path
from rollouts.trackers.sinks import Mark, SinkKind, TrackedRow
from tests.support.tracker_runs import BEGAN, append, make_row, make_run

Run = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LOOK_S", "FIRST_WAIT_S", "LAST_WAIT_S"):
        monkeypatch.setattr(follower, name, 0.01)
    return make_run(tmp_path / "run")


@dataclass
class FakeSink:
    """Stores rows, or raises the next of its faults."""

    store: list[TrackedRow] = field(default_factory=list)
    faults: list[Exception | None] = field(default_factory=list)
    bad: frozenset[int] = frozenset()  # steps that are refused for good
    most: int = 99  # rows of one send
    on_fault: Callable[[], None] = lambda: None
    close_faults: list[Exception | None] = field(default_factory=list)

    def send(self, rows: Sequence[TrackedRow]) -> Mark | None:
        if len(rows) > self.most or self.bad & set(steps(rows)):
            raise RowsRefused("bad value")
        fault = self.faults.pop(0) if self.faults else None
        if fault is None:
            self.store += rows
        if fault is not None:
            self.on_fault()
            raise fault
        return {"rows": len(self.store)}

    def close(self) -> None:
        if self.close_faults and (fault := self.close_faults.pop(0)):
            raise fault


def steps(rows: Sequence[TrackedRow]) -> list[int]:
    return [row.row["step"] for row in rows]


@pytest.fixture
def run_follower(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, list[str]]]:
    """(outcome, what was said) of following a run of eight steps that is over."""

    def run(sink: FakeSink, **kind: Any) -> tuple[str, list[str]]:
        said: list[str] = []
        over = trio.Event()
        over.set()
        append(root, *(make_row(step) for step in range(1, 9)))
        (root / "trackers").mkdir(exist_ok=True)
        monkeypatch.setattr(follower, "SINKS", {"fake": SinkKind("", **{"batch_rows": 3, **kind})})
        monkeypatch.setattr(follower, "open_sink", lambda name, run: sink)
        return trio.run(Follower(root, "fake", said.append, over).follow), said

    return run


def read_stored(root: Path) -> tuple[int, int]:
    """(rows taken or left out, rows left out) on disk."""
    position = open_position(position_path(root, "fake"))
    return position.number, position.left_out.rows


def test_a_service_that_is_away_gets_the_rows_later_and_that_is_said_once(run_follower: Run):
    sink = FakeSink(faults=[None, *[SinkUnavailable("no route")] * 4])
    outcome, said = run_follower(sink)
    assert (outcome, steps(sink.store)) == ("sent", [*range(1, 9)])
    assert said == ["does not take rows: no route; tried again until it does", "takes rows again"]


def test_a_refusal_ends_the_follower_when_the_run_is_over(run_follower: Run):
    sink = FakeSink(faults=[SinkRefused("wrong key")])
    assert run_follower(sink) == ("behind", ["refuses rows: wrong key"])


@pytest.mark.parametrize(
    ("bad", "most", "refused"), [({3}, 99, 1), ({1, 2, 3}, 99, 3), (set(), 2, 0), ({2, 8}, 1, 2)]
)
@pytest.mark.parametrize("confirms_at_close", [False, True])
def test_rows_refused_for_good_are_named_counted_and_left_out_and_the_others_arrive_once(
    root: Path, run_follower: Run, bad: set[int], most: int, refused: int, confirms_at_close: bool
):
    sink = FakeSink(bad=frozenset(bad), most=most)
    outcome, said = run_follower(sink, batch_rows=8, confirms_at_close=confirms_at_close)
    assert outcome == "sent"
    assert steps(sink.store) == [step for step in range(1, 9) if step not in bad]
    assert len(said) == refused
    assert all("(stage rl, step" in text and "is left out: bad value" in text for text in said)
    assert read_stored(root) == (8, refused)


def test_after_an_outage_in_the_middle_only_the_rest_of_the_batch_comes_again(root: Path, run_follower: Run):
    """Though an earlier row of another file was written meanwhile."""
    late = make_row(1, time_unix=BEGAN, name="heldout")
    sink = FakeSink(
        bad=frozenset({2}),
        faults=[None, None, SinkUnavailable("away")],
        on_fault=lambda: append(root, late, file="evaluations"),
    )
    assert run_follower(sink, batch_rows=8)[0] == "sent"
    sent = [(row.file, row.row["step"]) for row in sink.store]
    assert sorted(sent) == [("evaluations", 1), *(("metrics", step) for step in (1, 3, 4, 5, 6, 7, 8))]


def test_a_library_that_confirms_at_close_has_its_rows_counted_only_then(root: Path, run_follower: Run):
    sink = FakeSink(close_faults=[OSError("upload failed"), None])
    assert run_follower(sink, confirms_at_close=True)[0] == "sent"
    assert [row.number for row in sink.store] == [*range(8)] * 2
    assert read_stored(root) == (8, 0)
