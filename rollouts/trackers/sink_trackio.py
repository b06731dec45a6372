"""trackio: rows go into its local database (TRACKIO_DIR), project TRACKIO_PROJECT or `rollouts`; `trackio
show` shows them.

Written through its storage, not through `trackio.log`: that returns before anything is written and drops what
cannot be. Each row has an id, under which the database takes it once. Steps that a resumed run repeats are
shown twice, with their `STAGE/attempt`.
"""

from datetime import UTC, datetime

from rollouts.errors import SinkRefused
from rollouts.trackers.sinks import Batch, RunInfo, Sink


def open_sink(run: RunInfo) -> Sink:
    """One run of a trackio project. Nothing is held open between rows. Raises SinkRefused for a project name
    that trackio does not take, OSError and sqlite3.Error for a database that cannot be written now.
    """
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    project = run.environment.get("TRACKIO_PROJECT") or "rollouts"
    try:
        SQLiteStorage.validate_project_name(project)
    except ValueError as error:
        raise SinkRefused(f"TRACKIO_PROJECT={project}: {error}") from error

    def send(rows: Batch) -> None:
        """One transaction."""
        SQLiteStorage.bulk_log(
            project=project,
            run=run.name,
            run_id=run.id,
            metrics_list=[one.staged_metrics() for one in rows],
            steps=[one.row["step"] for one in rows],
            timestamps=[datetime.fromtimestamp(one.row["time_unix"], UTC).isoformat() for one in rows],
            log_ids=[f"{run.id}-{one.key}" for one in rows],
            config=dict(run.config) or None,
        )

    return Sink(send)
