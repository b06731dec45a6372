"""MLflow: the server or store that MLFLOW_TRACKING_URI names (otherwise MLflow's own default), experiment
MLFLOW_EXPERIMENT_NAME or `rollouts`.

The run is found again by a tag. A metric is stored with its time and step, and a database keeps one of equal
ones: rows that are sent again change nothing there. Steps that a resumed run repeats are shown twice;
`STAGE/attempt` tells them apart.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollouts.config.secrets import flatten_settings
from rollouts.errors import RowsRefused, SinkRefused
from rollouts.trackers.sinks import Batch, RunInfo, Sink, clean_name

TAG = "rollouts.run_id"
METRICS_PER_CALL, PARAM_CHARS = 1000, 500  # what every server takes
WORDS = 300  # characters of a server's words that are worth a line
# A server that does not answer is asked again by the follower, not for minutes by the client; a user's own
# values stay.
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def open_sink(run: RunInfo) -> Sink:
    """One run of an MLflow experiment, made if it is not there. It stays as it is when the sink is closed: a
    resumed run goes on with it. Raises SinkRefused, and what MLflow raises where the server does not answer.
    """
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

    with translating():
        client = MlflowClient()
        run_id = find_run(client, run)

    def send(rows: Batch) -> None:
        """One call for each thousand metrics. Raises SinkRefused or RowsRefused."""
        metrics = [
            Metric(clean_name(name, "/"), float(value), round(row.row["time_unix"] * 1000), row.row["step"])
            for row in rows
            for name, value in row.staged_metrics().items()
        ]
        with translating():
            try:
                for start in range(0, len(metrics), METRICS_PER_CALL):
                    part = metrics[start : start + METRICS_PER_CALL]
                    client.log_batch(run_id, metrics=part, synchronous=True)
            except Exception as error:
                # A row for a run that was deleted is refused in the same way as a bad row.
                if read_status(error) == 400 and client.get_run(run_id).info.lifecycle_stage == "active":
                    raise RowsRefused(" ".join(str(error).split())[:WORDS]) from error
                raise

    return Sink(send)


def find_run(client: Any, run: RunInfo) -> str:
    """MLflow's id of the run; makes it, with the settings as parameters, if there is none."""
    name = run.environment.get("MLFLOW_EXPERIMENT_NAME") or "rollouts"
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    if runs := client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1):
        return runs[0].info.run_id
    made = client.create_run(experiment, run_name=run.name).info.run_id
    for key, value in flatten_settings(run.config).items():
        client.log_param(made, clean_name(key, "/"), value[:PARAM_CHARS])
    client.set_tag(made, TAG, run.id)  # last: a run without it is not found, and made again whole
    return made


def read_status(error: Exception) -> int:
    """The HTTP status that MLflow gives an error of its own; 0 for another error."""
    return getattr(error, "get_http_status_code", int)()


@contextmanager
def translating() -> Iterator[None]:
    """MLflow's errors become SinkRefused where the server knows us not or finds the request wrong."""
    try:
        yield
    except Exception as error:
        if read_status(error) in (400, 401, 403, 404):
            raise SinkRefused(str(error)) from error
        raise
