"""The TensorBoard sink, read with TensorBoard's own reader."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rollouts.errors import SinkUnavailable
from rollouts.trackers.sink_tensorboard import open_sink
from rollouts.trackers.sinks import Mark, RunInfo, TrackedRow
from tests.unit.tracker_files import make_row, read_events

pytest.importorskip("tensorboard")


def make_info(root: Path, mark: Mark | None = None) -> RunInfo:
    return RunInfo("0123456789abcdef" * 2, "run", root, {}, {}, mark)


def rows(*steps: int, attempt: int = 1, stage: str = "rl") -> list[TrackedRow]:
    return [TrackedRow("metrics", make_row(step, attempt=attempt, stage=stage)) for step in steps]


def hash_files(root: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("events.*")}


def test_a_row_is_a_point_of_each_metric_and_a_stage_is_a_run(tmp_path: Path):
    sink = open_sink(make_info(tmp_path))
    sink.send([*rows(1, 2), *rows(1, stage="sft")])
    sink.send(
        [
            TrackedRow(
                "evaluations",
                make_row(2, **{"name": "heldout", "eval/heldout/avg@4": 0.25}),
                aliases={"eval_reward": 0.5},
            )
        ]
    )
    sink.close()
    assert read_events(tmp_path) == {
        "loss/total": [(1, 1.0), (2, 2.0)],
        "reward/mean": [(1, 0.5), (2, 1.0)],
        "eval/heldout/avg@4": [(2, 0.25)],
        "eval_reward": [(2, 0.5)],
    }
    assert read_events(tmp_path, "sft") == {"loss/total": [(1, 1.0)], "reward/mean": [(1, 0.5)]}


def test_what_was_written_after_the_mark_is_cut_off_and_written_again_as_it_was(tmp_path: Path):
    sink = open_sink(make_info(tmp_path))
    mark = sink.send(rows(1, 2))
    sink.send([*rows(3, 4), *rows(1, stage="sft")])
    before = hash_files(tmp_path)
    killed = open_sink(make_info(tmp_path, mark))
    assert not (tmp_path / "trackers/tensorboard/sft").exists() or not list(
        (tmp_path / "trackers/tensorboard/sft").iterdir()
    )
    killed.send([*rows(3, 4), *rows(1, stage="sft")])
    assert hash_files(tmp_path) == before
    assert read_events(tmp_path)["loss/total"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_torn_event_of_a_killed_follower_is_cut_off(tmp_path: Path):
    mark = open_sink(make_info(tmp_path)).send(rows(1, 2))
    (path,) = tmp_path.rglob("events.*")
    with path.open("ab") as file:
        file.write(b"\x10\0\0\0")
    open_sink(make_info(tmp_path, mark)).send(rows(3))
    assert read_events(tmp_path)["reward/mean"] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_files_that_others_wrote_are_left_alone(tmp_path: Path):
    other = tmp_path / "trackers/tensorboard/rl/events.out.tfevents.1800000000.myhost.0"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"other")
    open_sink(make_info(tmp_path)).send(rows(1))
    open_sink(make_info(tmp_path))
    assert other.read_bytes() == b"other"


def test_repeated_steps_of_a_resumed_run_replace_those_of_the_attempt_before(tmp_path: Path):
    mark = open_sink(make_info(tmp_path)).send(
        [*rows(1, 2, 3, 4), TrackedRow("evaluations", make_row(4, **{"eval/heldout/avg@4": 0.1}))]
    )
    assert mark is not None
    resumed = open_sink(make_info(tmp_path, mark))
    again = TrackedRow(
        "evaluations", make_row(2, attempt=2, **{"eval/heldout/avg@4": 0.9})
    )  # before the first step of the attempt
    resumed.send([again, *rows(3, 4, 5, attempt=2)])
    shown = read_events(tmp_path)
    assert shown["loss/total"] == [(1, 1.0), (2, 2.0), (3, 6.0), (4, 8.0), (5, 10.0)]
    assert shown["eval/heldout/avg@4"] == [(2, pytest.approx(0.9))]


def test_a_file_that_lost_its_end_is_followed_by_another(tmp_path: Path):
    mark = open_sink(make_info(tmp_path)).send(rows(1, 2, 3))
    (path,) = tmp_path.rglob("events.*")
    path.write_bytes(path.read_bytes()[:-5])
    open_sink(make_info(tmp_path, mark)).send(rows(4))
    assert len(list(tmp_path.rglob("events.*"))) == 2
    assert [step for step, _ in read_events(tmp_path)["loss/total"]] == [1, 2, 4]


def test_a_directory_that_cannot_be_written_is_tried_again_later(tmp_path: Path):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "tensorboard").write_text("a file where the directory is to be")
    sink = open_sink(make_info(tmp_path))
    with pytest.raises(SinkUnavailable, match="tensorboard cannot be written"):
        sink.send(rows(1))
    (tmp_path / "trackers" / "tensorboard").unlink()
    open_sink(make_info(tmp_path)).send(rows(1))
    assert read_events(tmp_path)["loss/total"] == [(1, 1.0)]
