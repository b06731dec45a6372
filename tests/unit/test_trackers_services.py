"""The sinks of trackio, Weights & Biases and MLflow, each with its own package and storage on this machine.
Run by `make test-trackers`.
"""

import importlib
import json
import struct

import pytest

from rollouts.errors import RowsRefused, SinkRefused
from rollouts.trackers.sinks import Place, RunInfo, TrackedRow, open_sink
from tests.support.tracker_runs import BEGAN, make_row

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say of each other

ID = "0123456789abcdef" * 2
ROWS = [TrackedRow("metrics", make_row(step), step - 1, Place(0, step)) for step in (1, 2, 3)]
ROWS += [TrackedRow("evaluations", make_row(3, **{"name": "heldout", "eval/heldout/avg@4": 0.25}), 3)]
REPEATED = [
    TrackedRow("metrics", make_row(step, attempt=2), step + 1, Place(0, step + 10)) for step in (3, 4)
]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/trackers").mkdir(parents=True)
    return tmp_path / "run"


def open_named(name, root):
    return open_sink(name, RunInfo(ID, "run", root, {"seed": 1, "rl": {"steps": 4}}, {}))


def test_trackio_stores_rows_once_though_they_are_sent_twice(root, monkeypatch):
    storage = pytest.importorskip("trackio.sqlite_storage")
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(importlib.import_module(module), "TRACKIO_DIR", root / "trackio")
    open_named("trackio", root).send(ROWS)
    open_named("trackio", root).send([*ROWS, *REPEATED])
    logs = storage.SQLiteStorage.get_logs("rollouts", "run", run_id=ID)
    names = ("step", "rl/loss/total", "rl/attempt")
    losses = [[log[name] for name in names] for log in logs if "rl/loss/total" in log]
    assert losses == json.loads("[[1, -1.0, 1], [2, -2.0, 1], [3, -3.0, 1], [3, -6.0, 2], [4, -8.0, 2]]")
    (evaluation,) = (log for log in logs if "rl/eval/heldout/avg@4" in log)
    assert (evaluation["step"], evaluation["rl/attempt"]) == (3, 1)
    assert str(logs[0]["timestamp"]).startswith("2027-01-15T08:16:41")  # BEGAN + 1001 s


# --- wandb --------------------------------------------------------------------------------------------------


def read_records(data):
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


def test_wandb_has_rows_in_the_file_of_an_offline_run_with_their_numbers_as_steps(root, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "planted0123456789planted0123456789planted")
    sink = open_named("wandb", root)
    sink.send(ROWS)
    sink.send(REPEATED)
    sink.close()
    (path,) = root.rglob("run-*.wandb")
    records = map(Record.FromString, read_records(path.read_bytes()))
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    names = ("_step", "rl/step", "rl/loss/total", "rl/attempt")
    losses = [[row[name] for name in names] for row in history if "rl/loss/total" in row]
    expected = "[[0, 1, -1.0, 1], [1, 2, -2.0, 1], [2, 3, -3.0, 1], [4, 3, -6.0, 2], [5, 4, -8.0, 2]]"
    assert losses == json.loads(expected)
    (evaluation,) = (row for row in history if "rl/eval/heldout/avg@4" in row)
    assert (evaluation["rl/eval/heldout/avg@4"], evaluation["_step"]) == (0.25, 3)


# --- mlflow -------------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")  # mlflow-skinny has no store of its own
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return mlflow.MlflowClient()


def find_run(client):
    (run,) = client.search_runs([client.get_experiment_by_name("rollouts").experiment_id])
    return run


def test_mlflow_stores_rows_once_in_one_run_though_they_are_sent_twice(root, client):
    open_named("mlflow", root).send(ROWS)
    open_named("mlflow", root).send([*ROWS, *REPEATED])
    run = find_run(client)
    assert (run.info.run_name, run.data.params) == ("run", {"seed": "1", "rl.steps": "4"})
    history = client.get_metric_history(run.info.run_id, "rl/loss/total")
    points = sorted((point.timestamp - BEGAN * 1000, point.step, point.value) for point in history)
    first = [(1_000_000 + 1000 * step, step, -step) for step in (1, 2, 3)]
    assert points == first + [(2_000_000 + 1000 * step, step, -2 * step) for step in (3, 4)]
    assert run.data.metrics["rl/eval/heldout/avg_at_4"] == 0.25


def test_a_row_that_mlflow_does_not_take_is_at_fault_and_a_run_that_was_deleted_is_not(root, client):
    sink = open_named("mlflow", root)
    with pytest.raises(RowsRefused, match="maximum length of 250"):
        sink.send([TrackedRow("metrics", make_row(1, **{"a/" + "b" * 300: 1.0}))])
    sink.send(ROWS)
    client.delete_run(find_run(client).info.run_id)
    with pytest.raises(SinkRefused, match="deleted"):
        sink.send(ROWS)
