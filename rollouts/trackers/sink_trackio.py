"""trackio: rows go into its local database (TRACKIO_DIR), project TRACKIO_PROJECT or `rollouts`; `trackio
show` shows them.

Written through its storage, not through `trackio.log`: that returns before anything is written and drops what
cannot be. Each row has an id, under which the database takes it once. Steps that a resumed run repeats are
shown twice, with their `STAGE/attempt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from sqlite3 import Error
from typing import Any

from rollouts.errors import SinkRefused, SinkUnavailable
from rollouts.trackers.sinks import RunInfo, TrackedRow


def open_sink(run: RunInfo) -> TrackioSink:
    """The sink of a run. Raises SinkRefused for a project name that trackio does not take."""
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    project = run.environment.get("TRACKIO_PROJECT") or "rollouts"
    try:
        SQLiteStorage.validate_project_name(project)
    except ValueError as error:
        raise SinkRefused(f"TRACKIO_PROJECT={project}: {error}") from error
    return TrackioSink(SQLiteStorage, project, run)


class TrackioSink:
    """One run of a trackio project."""

    def __init__(self, storage: Any, project: str, run: RunInfo) -> None:
        self._storage = storage
        self._project = project
        self._run = run

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """One transaction. Raises SinkUnavailable for a database that cannot be written now."""
        try:
            self._storage.bulk_log(
                project=self._project,
                run=self._run.name,
                run_id=self._run.id,
                metrics_list=[tracked.staged_metrics() for tracked in rows],
                steps=[tracked.row["step"] for tracked in rows],
                timestamps=[
                    datetime.fromtimestamp(tracked.row["time_unix"], UTC).isoformat() for tracked in rows
                ],
                log_ids=[f"{self._run.id}-{tracked.key}" for tracked in rows],
                config=dict(self._run.config) or None,
            )
        except (OSError, Error) as error:
            raise SinkUnavailable(f"its database cannot be written ({error})") from error

    def close(self) -> None:
        """Nothing is held open between rows."""
