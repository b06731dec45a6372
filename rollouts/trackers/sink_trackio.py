"""trackio: rows go into its local database (TRACKIO_DIR), project TRACKIO_PROJECT or `rollouts`; `trackio
show` shows them.

Written through its storage, not through `trackio.log`: that returns before anything is written and drops what
cannot be. Each row has an id, under which the database takes it once. Steps that a resumed run repeats are
shown twice, with their `STAGE/attempt`.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from rollouts.errors import SinkRefused
from rollouts.trackers.sinks import RunInfo, TrackedRow


class TrackioSink:
    """One run of a trackio project. Raises SinkRefused for a project name that trackio does not take, OSError
    and sqlite3.Error for a database that cannot be written now.
    """

    def __init__(self, run: RunInfo) -> None:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        self._storage, self._run = SQLiteStorage, run
        self._project = run.environment.get("TRACKIO_PROJECT") or "rollouts"
        try:
            SQLiteStorage.validate_project_name(self._project)
        except ValueError as error:
            raise SinkRefused(f"TRACKIO_PROJECT={self._project}: {error}") from error

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """One transaction."""
        times = [datetime.fromtimestamp(tracked.row["time_unix"], UTC) for tracked in rows]
        self._storage.bulk_log(
            project=self._project,
            run=self._run.name,
            run_id=self._run.id,
            metrics_list=[tracked.staged_metrics() for tracked in rows],
            steps=[tracked.row["step"] for tracked in rows],
            timestamps=[time.isoformat() for time in times],
            log_ids=[f"{self._run.id}-{tracked.key}" for tracked in rows],
            config=dict(self._run.config) or None,
        )

    def close(self) -> None:
        """Nothing is held open between rows."""


open_sink = TrackioSink
