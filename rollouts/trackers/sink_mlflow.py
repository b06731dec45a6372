"""MLflow: the server or store that MLFLOW_TRACKING_URI names (otherwise MLflow's own default), experiment
MLFLOW_EXPERIMENT_NAME or `rollouts`.

The run is found again by a tag. A metric is stored with its time and step, and a database keeps one of equal
ones: rows that are sent again change nothing there. Steps that a resumed run repeats are shown twice;
`STAGE/attempt` tells them apart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rollouts.config.secrets import flatten_settings
from rollouts.errors import RowsRefused, SinkRefused, SinkUnavailable, TrackerError
from rollouts.trackers.sinks import RunInfo, TrackedRow, clean_name

TAG = "rollouts.run_id"
METRICS_PER_CALL, PARAMS_PER_CALL, PARAM_CHARS = 1000, 100, 500  # what every server takes
WORDS = 300  # characters of a server's words that are worth a line
# A server that does not answer is asked again by the follower, not for minutes by the client; a user's own
# values stay.
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def open_sink(run: RunInfo) -> MlflowSink:
    """The sink of a run, made in MLflow if it is not there. Raises SinkRefused or SinkUnavailable."""
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
    from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

    try:
        client = MlflowClient()
        return MlflowSink(client, find_run(client, run), MlflowException)
    except MlflowException as error:
        raise translate(error) from error


def find_run(client: Any, run: RunInfo) -> str:
    """MLflow's id of the run; makes it, with the settings as parameters, if there is none."""
    experiment = run.environment.get("MLFLOW_EXPERIMENT_NAME") or "rollouts"
    found = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{TAG}` = '{run.id}'", max_results=1)
    if runs:
        return runs[0].info.run_id
    from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

    made = client.create_run(experiment_id, run_name=run.name).info.run_id
    params = [
        Param(clean_name(name, "/"), value[:PARAM_CHARS])
        for name, value in flatten_settings(run.config).items()
    ]
    for start in range(0, len(params), PARAMS_PER_CALL):
        client.log_batch(made, params=params[start : start + PARAMS_PER_CALL])
    client.set_tag(made, TAG, run.id)  # last: a run without it is not found, and made again whole
    return made


class MlflowSink:
    """One run of an MLflow experiment."""

    def __init__(self, client: Any, run_id: str, failure: type[Exception]) -> None:
        self._client = client
        self._run_id = run_id
        self._failure = failure

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """One call for each thousand metrics. Raises SinkRefused, SinkUnavailable or RowsRefused."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        metrics = [
            Metric(clean_name(name, "/"), float(value), round(row.row["time_unix"] * 1000), row.row["step"])
            for row in rows
            for name, value in row.staged_metrics().items()
        ]
        try:
            for start in range(0, len(metrics), METRICS_PER_CALL):
                self._client.log_batch(
                    self._run_id, metrics=metrics[start : start + METRICS_PER_CALL], synchronous=True
                )
        except self._failure as error:
            failure: Any = error
            # A row for a run that was deleted is refused in the same way as a bad row.
            if (
                failure.get_http_status_code() == 400
                and self._client.get_run(self._run_id).info.lifecycle_stage == "active"
            ):
                raise RowsRefused(" ".join(str(error).split())[:WORDS]) from error
            raise translate(error) from error

    def close(self) -> None:
        """The run stays as it is: a resumed run goes on with it."""


def translate(error: Any) -> TrackerError:
    """Whether a person has to act: the server knows us not, or finds the request wrong."""
    status = error.get_http_status_code()
    return SinkRefused(str(error)) if status in (400, 401, 403, 404) else SinkUnavailable(str(error))
