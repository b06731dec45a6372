"""The sinks of trackio, Weights & Biases and MLflow, each with its own package and storage on this machine.
Run by `make test-trackers`.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.errors import RowsRefused, SinkRefused
from rollouts.trackers.sinks import Place, RunInfo, TrackedRow
from tests.support.tracker_runs import BEGAN, make_row

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say of each other

ID = "0123456789abcdef" * 2
ROWS = [TrackedRow("metrics", make_row(step), step - 1, Place(0, step)) for step in (1, 2, 3)]
EVALUATION = TrackedRow("evaluations", make_row(3, **{"name": "heldout", "eval/heldout/avg@4": 0.25}), 3)
REPEATED = [
    TrackedRow("metrics", make_row(step, attempt=2), step + 1, Place(0, step + 10)) for step in (3, 4)
]


def make_info(root: Path, **environment: str) -> RunInfo:
    root.mkdir(exist_ok=True)
    (root / "trackers").mkdir(exist_ok=True)
    return RunInfo(ID, "run", root, {"seed": 1, "rl": {"steps": 4}}, environment)


# --- trackio ------------------------------------------------------------------------------------------------


class TestTrackio:
    @pytest.fixture
    def database(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        storage = pytest.importorskip("trackio.sqlite_storage")
        for module in ("trackio.utils", "trackio.sqlite_storage"):
            monkeypatch.setattr(importlib.import_module(module), "TRACKIO_DIR", tmp_path / "trackio")
        return storage.SQLiteStorage.get_project_db_path("rollouts")

    def read(self) -> list[dict[str, object]]:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        return SQLiteStorage.get_logs("rollouts", "run", run_id=ID)

    def test_rows_are_stored_once_though_they_are_sent_twice(self, tmp_path: Path, database: Path):
        from rollouts.trackers.sink_trackio import open_sink

        open_sink(make_info(tmp_path / "run")).send([*ROWS, EVALUATION])
        open_sink(make_info(tmp_path / "run")).send([*ROWS, EVALUATION, *REPEATED])
        logs = self.read()
        losses = [
            (log["step"], log["rl/loss/total"], log["rl/attempt"]) for log in logs if "rl/loss/total" in log
        ]
        assert losses == [(1, -1.0, 1), (2, -2.0, 1), (3, -3.0, 1), (3, -6.0, 2), (4, -8.0, 2)]
        (evaluation,) = (log for log in logs if "rl/eval/heldout/avg@4" in log)
        assert (evaluation["step"], evaluation["rl/attempt"]) == (3, 1)
        assert str(logs[0]["timestamp"]).startswith("2027-01-15T08:16:41")  # BEGAN + 1001 s


def read_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after wandb's own 7 bytes: pieces of (crc, length, kind) in
    blocks of 32 KiB.
    """
    place, held = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        held += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield held
            held = b""


# --- wandb --------------------------------------------------------------------------------------------------


class TestWandb:
    @pytest.fixture
    def offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_API_KEY", "planted0123456789planted0123456789planted")
        monkeypatch.chdir(tmp_path)

    def read(self, root: Path) -> list[dict[str, str]]:
        """The history of the offline runs, in the order of their files, as JSON texts."""
        from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

        history: list[dict[str, str]] = []
        for path in sorted(root.rglob("run-*.wandb")):
            for data in read_records(path.read_bytes()):
                record = Record()
                record.ParseFromString(data)
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    history.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
        return history

    def test_rows_are_in_the_file_of_the_offline_run_with_their_numbers_as_steps(
        self, tmp_path: Path, offline: None
    ):
        from rollouts.trackers.sink_wandb import open_sink

        root = tmp_path / "run"
        sink = open_sink(make_info(root))
        sink.send([*ROWS, EVALUATION])
        sink.send(REPEATED)
        sink.close()
        history = self.read(root)
        losses = [
            (row["_step"], row["rl/step"], row["rl/loss/total"], row["rl/attempt"])
            for row in history
            if "rl/loss/total" in row
        ]
        expected = [(0, 1, -1.0, 1), (1, 2, -2.0, 1), (2, 3, -3.0, 1), (4, 3, -6.0, 2), (5, 4, -8.0, 2)]
        assert [tuple(float(value) for value in row) for row in losses] == expected
        (evaluation,) = (row for row in history if "rl/eval/heldout/avg@4" in row)
        assert (float(evaluation["rl/eval/heldout/avg@4"]), float(evaluation["_step"])) == (0.25, 3)


# --- mlflow -------------------------------------------------------------------------------------------------


class TestMlflow:
    @pytest.fixture
    def client(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        mlflow = pytest.importorskip("mlflow")
        pytest.importorskip("sqlalchemy")  # mlflow-skinny has no store of its own
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        monkeypatch.chdir(tmp_path)
        return mlflow.MlflowClient()

    def test_rows_are_stored_once_in_one_run_though_they_are_sent_twice(self, tmp_path: Path, client: Any):
        from rollouts.trackers.sink_mlflow import open_sink

        open_sink(make_info(tmp_path / "run")).send([*ROWS, EVALUATION])
        open_sink(make_info(tmp_path / "run")).send([*ROWS, EVALUATION, *REPEATED])
        experiment = client.get_experiment_by_name("rollouts")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.run_name == "run"
        assert run.data.params == {"seed": "1", "rl.steps": "4"}
        history = client.get_metric_history(run.info.run_id, "rl/loss/total")
        points = [
            (point.step, point.value, point.timestamp)
            for point in sorted(history, key=lambda point: point.timestamp)
        ]
        first, second = round(BEGAN * 1000) + 1_000_000, round(BEGAN * 1000) + 2_000_000
        assert points == [
            *((step, -float(step), first + 1000 * step) for step in (1, 2, 3)),
            *((step, -2.0 * step, second + 1000 * step) for step in (3, 4)),
        ]
        assert run.data.metrics["rl/eval/heldout/avg_at_4"] == 0.25

    def test_a_row_that_it_does_not_take_is_at_fault_and_a_run_that_was_deleted_is_not(
        self, tmp_path: Path, client: Any
    ):
        from rollouts.trackers.sink_mlflow import open_sink

        sink = open_sink(make_info(tmp_path / "run"))
        with pytest.raises(RowsRefused, match="maximum length of 250"):
            sink.send([TrackedRow("metrics", make_row(1, **{"a/" + "b" * 300: 1.0}))])
        sink.send(ROWS)
        (run,) = client.search_runs([client.get_experiment_by_name("rollouts").experiment_id])
        client.delete_run(run.info.run_id)
        with pytest.raises(SinkRefused, match="deleted"):
            sink.send(ROWS)
