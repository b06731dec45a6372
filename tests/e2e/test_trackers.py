"""A real run with trackers: TensorBoard has what the files have, a collector that hangs costs nothing, and no
secret is left anywhere.
"""

import socket
import time

import pytest

from rollouts.run_dir import RunDir
from tests.support.compare_runs import read_stage
from tests.support.processes import find_processes
from tests.support.tracker_runs import read_events

pytest.importorskip("tensorboard")
SECRETS = {
    "WANDB_API_KEY": "planted-wandb-0123456789",
    "MLFLOW_TRACKING_TOKEN": "planted-mlflow-0123456789",
    "MLFLOW_TRACKING_PASSWORD": "planted-password-0123456789",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=planted-otlp-0123456789",
    "HF_TOKEN": "planted-hub-0123456789",
}


@pytest.mark.slow
def test_trackers_of_a_run_have_its_rows_and_one_that_hangs_is_told_and_ended(train, tmp_path, monkeypatch):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # connections wait in its queue: nobody answers
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{hanging.getsockname()[1]}")
        done = train.run_fresh(out, "--output.trackers", '["tensorboard", "otlp"]')
        assert f"python -m rollouts track {out} --to otlp --once" in done.stderr
        deadline = time.monotonic() + 90
        while find_processes(str(out)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert find_processes(str(out)) == []
    run_dir = RunDir(out)
    for stage in ("sft", "rl"):
        rows = read_stage(run_dir.metrics, stage)
        shown = read_events(out, stage)
        expected = [(row["step"], pytest.approx(row["loss/total"])) for row in rows]
        assert shown["loss/total"] == expected
    assert [step for step, _ in read_events(out, "base")["eval/heldout/avg@1"]] == [0]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert (out / "trackers/otlp.log") in files
    assert (out / "trackers/tensorboard.json") in files
    assert [path for path in files if b"planted-" in path.read_bytes()] == []
    assert "planted-" not in done.stdout + done.stderr
