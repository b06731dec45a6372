"""What a follower sends, once or again; what failures and refusals of a service cost, and what is said of
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable, TrackerError
from rollouts.trackers import worker
from rollouts.trackers.position import Position, count_unsent, open_position, position_path
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow
from rollouts.trackers.worker import DONE, REFUSED, Control, choose_wait, follow
from tests.unit.tracker_fakes import FILES, FakeControl, FakeSink, make_following, steps
from tests.unit.tracker_files import BEGAN, append, make_row, make_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def test_everything_is_sent_once_and_a_second_follower_goes_on_from_there(root: Path):
    append(root, *(make_row(step) for step in range(1, 8)))
    store: list[TrackedRow] = []
    said: list[str] = []
    following = make_following(root, FakeSink(store, []), said)
    assert follow(following, FakeControl()) == DONE
    append(root, make_row(8))
    assert follow(following, FakeControl()) == DONE
    assert steps(store) == list(range(1, 9))
    assert [row.number for row in store] == list(range(8))
    position = open_position(following.position_path)
    assert (position.number, position.mark, position.sending, said) == (8, {"rows": 8}, None, [])


def test_a_service_that_is_away_gets_the_rows_later_and_that_is_said_once(root: Path):
    append(root, *(make_row(step) for step in range(1, 5)))
    store: list[TrackedRow] = []
    said: list[str] = []
    faults: list[Exception | None] = [None, *[SinkUnavailable("no route")] * 4]
    control = FakeControl()
    assert follow(make_following(root, FakeSink(store, faults), said), control, draw=lambda: 0.0) == DONE
    assert steps(store) == [1, 2, 3, 4]
    assert control.waits == [0.5, 1.0, 2.0, 4.0]
    assert said == ["does not take rows: no route; tried again until it does", "takes rows again"]


def test_rows_of_which_the_answer_was_lost_come_again_with_their_numbers(root: Path):
    append(root, *(make_row(step) for step in range(1, 5)))
    store: list[TrackedRow] = []
    sink = FakeSink(store, [OSError("reset")], after=True)
    assert follow(make_following(root, sink, []), FakeControl()) == DONE
    assert [(row.row["step"], row.number) for row in store] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]


def test_a_refusal_ends_the_follower_only_when_the_run_is_over(root: Path):
    append(root, make_row(1))
    said: list[str] = []
    control = FakeControl()
    control.over = False

    def end_run(seconds: float) -> None:
        control.waits += [seconds] if seconds else []
        control.over = len(control.waits) >= 2

    control.wait = end_run  # pyright: ignore[reportAttributeAccessIssue]
    faults: list[Exception | None] = [SinkRefused("wrong key")] * 9
    assert follow(make_following(root, FakeSink([], faults), said), control) == REFUSED
    assert control.waits == [300.0, 300.0]
    assert said == ["refuses rows: wrong key; tried again until it does", "refuses rows: wrong key"]


class PickySink(FakeSink):
    """Refuses for good what holds one of these steps, or more rows than this; raises `failure` when it is
    sent step `fails_at` alone.
    """

    def __init__(
        self, store: list[TrackedRow], *, bad: set[int] = frozenset(), most: int = 99, fails_at: int = 0
    ) -> None:  # pyright: ignore[reportArgumentType]
        super().__init__(store, [])
        self.bad, self.most, self.fails_at, self.failure = bad, most, fails_at, SinkUnavailable("no route")
        self.sends = 0

    def send(self, rows: Sequence[TrackedRow]) -> Mark | None:
        self.sends += 1
        if self.fails_at in steps(rows) and len(rows) <= 2:
            self.fails_at = 0
            raise self.failure
        if self.bad & set(steps(rows)) or len(rows) > self.most:
            raise RowsRefused("bad value")
        return super().send(rows)


def test_a_row_that_is_refused_for_good_is_named_counted_and_left_out_and_the_others_arrive_once(root: Path):
    append(root, *(make_row(step) for step in range(1, 9)))
    said: list[str] = []
    store: list[TrackedRow] = []
    sink = PickySink(store, bad={3})
    following = make_following(root, sink, said, batch_rows=8)
    assert follow(following, FakeControl()) == DONE
    assert [(row.row["step"], row.number) for row in store] == [
        (1, 0),
        (2, 1),
        (4, 3),
        (5, 4),
        (6, 5),
        (7, 6),
        (8, 7),
    ]
    assert sink.sends == 7  # 1-8, 1-4, 1-2, 3-4, 3, 4, 5-8
    assert said == [
        "refuses row of metrics.jsonl (stage rl, step 3, attempt 1) for good; it is left out: bad value"
    ]
    position = open_position(following.position_path)
    assert position.left_out == (1, "row of metrics.jsonl (stage rl, step 3, attempt 1)")
    assert (position.number, position.sending, count_unsent(root, FILES, position)) == (8, None, 0)


def test_rows_that_are_too_many_arrive_in_parts_and_none_is_left_out(root: Path):
    append(root, *(make_row(step) for step in range(1, 9)))
    store: list[TrackedRow] = []
    said: list[str] = []
    following = make_following(root, PickySink(store, most=3), said, batch_rows=8)
    assert follow(following, FakeControl()) == DONE
    assert (steps(store), said) == (list(range(1, 9)), [])
    assert open_position(following.position_path).left_out.rows == 0


def test_after_an_outage_in_the_middle_only_the_rest_of_the_batch_comes_again_with_its_numbers(root: Path):
    """Though an earlier row of another file was written meanwhile: the numbers say in the service which row
    is which.
    """
    append(root, *(make_row(step) for step in range(1, 9)))
    said: list[str] = []
    store: list[TrackedRow] = []
    sink = PickySink(store, bad={2, 6}, fails_at=5)
    following = make_following(root, sink, said, batch_rows=8)
    control = FakeControl()
    stored: list[Position] = []

    def wait(seconds: float) -> None:
        if seconds:
            stored.append(open_position(following.position_path))
            append(root, make_row(1, time_unix=BEGAN, name="heldout"), file="evaluations")

    control.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
    assert follow(following, control) == DONE
    assert [(row.row["step"], row.number) for row in store] == [
        (1, 0),
        (3, 2),
        (4, 3),
        (5, 4),
        (7, 6),
        (8, 7),
        (1, 8),
    ]
    assert [(position.number, position.left_out.rows, position.sending is None) for position in stored] == [
        (4, 1, False)
    ]
    assert open_position(following.position_path).left_out.rows == 2


def test_a_batch_of_which_every_row_is_refused_holds_up_nothing(root: Path):
    append(root, *(make_row(step) for step in range(1, 6)))
    store: list[TrackedRow] = []
    said: list[str] = []
    following = make_following(root, PickySink(store, bad={1, 2, 3}), said)
    assert follow(following, FakeControl()) == DONE
    assert (steps(store), len(said), open_position(following.position_path).left_out.rows) == ([4, 5], 3, 3)


def test_rows_refused_by_a_library_that_confirms_at_close_are_left_out_when_it_has_confirmed(root: Path):
    append(root, *(make_row(step) for step in range(1, 6)))
    store: list[TrackedRow] = []
    following = make_following(root, PickySink(store, bad={2}), [], confirms_at_close=True)
    assert follow(following, FakeControl()) == DONE
    position = open_position(following.position_path)
    assert (steps(store), position.number, position.left_out.rows, position.sending) == (
        [1, 3, 4, 5],
        5,
        1,
        None,
    )


def test_settings_of_the_environment_that_are_wrong_are_a_refusal(root: Path):
    said: list[str] = []
    following = make_following(root, FakeSink([], []), said)

    def open_sink(run: RunInfo) -> FakeSink:
        raise TrackerError("PORT=x is no port")

    assert follow(replace(following, open_sink=open_sink), FakeControl()) == REFUSED
    assert said == ["refuses rows: PORT=x is no port"]


def test_a_library_that_confirms_at_close_has_its_rows_counted_only_then(root: Path):
    append(root, *(make_row(step) for step in range(1, 5)))
    held: list[tuple[int, int]] = []

    class Late(FakeSink):
        closings: list[Exception | None] = [OSError("upload failed"), None]

        def close(self) -> None:
            position = open_position(position_path(root, "fake"))
            held.append((position.number, position.handed))
            fault = self.closings.pop(0)
            if fault is not None:
                raise fault

    store: list[TrackedRow] = []
    following = make_following(root, Late(store, []), [], confirms_at_close=True)
    assert follow(following, FakeControl()) == DONE
    assert held == [(0, 4), (0, 4)]
    assert [row.number for row in store] == [0, 1, 2, 3] * 2
    assert open_position(following.position_path).number == 4


@pytest.mark.parametrize(
    ("failures", "asked_s", "over", "draw", "expected"),
    [
        (1, None, False, 0.0, 0.5),
        (4, None, False, 0.0, 4.0),
        (4, None, False, 1.0, 2.0),
        (9999, None, False, 0.0, 60.0),
        (9, None, True, 0.0, 5.0),
        (1, 20.0, False, 0.0, 20.0),
        (1, 1e9, False, 0.0, 300.0),
        (1, 20.0, True, 0.0, 5.0),
    ],
)
def test_waits_double_up_to_a_limit_and_heed_the_service(
    failures: int, asked_s: float | None, over: bool, draw: float, expected: float
):
    assert choose_wait(failures, asked_s=asked_s, over=over, draw=lambda: draw) == expected


def test_the_end_of_the_pipe_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(worker, "leave", leave)
    readable, writable = os.pipe()
    control = Control(readable)
    os.write(writable, b"o")
    control.wait(30.0)
    assert control.over
    os.close(writable)
    with pytest.raises(SystemExit, match="5"):
        control.wait(30.0)
    os.close(readable)


def test_a_sink_is_told_its_run_and_the_mark_of_the_last_position(root: Path):
    append(root, make_row(1))
    seen: list[RunInfo] = []
    sink = FakeSink([], [])
    following = make_following(root, sink, [])

    def open_sink(run: RunInfo) -> FakeSink:
        seen.append(run)
        return sink

    following = replace(following, open_sink=open_sink)
    follow(following, FakeControl())
    follow(following, FakeControl())
    assert [run.mark for run in seen] == [None, {"rows": 1}]
    assert seen[0].id == seen[1].id
    assert (seen[0].name, seen[0].root, seen[0].config["name"]) == ("run", root, "t")
