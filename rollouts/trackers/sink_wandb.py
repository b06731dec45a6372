"""Weights & Biases: project WANDB_PROJECT or `rollouts`, one run, its files in RUN/trackers/wandb; the key
from WANDB_API_KEY or its own login.

wandb.log returns before anything is sent, so rows count as sent when the run was finished. A follower that
was killed before that sends them again, as the same run with the same `_step`s, and wandb leaves out the
steps that it has. Steps that a resumed run repeats are shown twice, with their `STAGE/attempt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollouts.errors import SinkRefused, SinkUnavailable
from rollouts.trackers.sinks import RunInfo, TrackedRow


def open_sink(run: RunInfo) -> WandbSink:
    """The sink of a run. Raises SinkRefused for a key that is missing or wrong, SinkUnavailable where the
    service does not answer.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    folder = run.root / "trackers" / "wandb"
    folder.mkdir(exist_ok=True)
    # Nothing of this process is worth recording: it is not the one that trains.
    settings = wandb.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
    )
    try:
        opened = wandb.init(
            project=run.environment.get("WANDB_PROJECT") or "rollouts",
            id=run.id,
            name=run.environment.get("WANDB_NAME") or run.name,
            resume="allow",
            dir=str(folder),
            config=dict(run.config),
            settings=settings,
        )
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        raise SinkRefused(f"{error}; set WANDB_API_KEY, or WANDB_MODE=offline") from error
    except (wandb.errors.Error, OSError) as error:
        raise SinkUnavailable(str(error)) from error
    return WandbSink(opened, wandb.teardown)


class WandbSink:
    """One run of a wandb project."""

    def __init__(self, opened: Any, teardown: Callable[[], None]) -> None:
        self._run = opened
        self._teardown = teardown
        self._stages: set[str] = set()  # whose axis is defined

    def send(self, rows: Sequence[TrackedRow]) -> None:
        """Hands the rows to wandb's own process."""
        for tracked in rows:
            stage = tracked.row["stage"]
            if stage not in self._stages:
                self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
                self._stages.add(stage)
            values = {**tracked.staged_metrics(), f"{stage}/step": tracked.row["step"]}
            self._run.log(values, step=tracked.number)

    def close(self) -> None:
        """Returns when the service has everything, or the file of a run that is offline."""
        self._run.finish()
        # finish may return before wandb's own process has written the end of its file, and that is killed
        # after this one
        self._teardown()
