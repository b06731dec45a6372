"""Weights & Biases: project WANDB_PROJECT or `rollouts`, one run, its files in RUN/trackers/wandb; the key
from WANDB_API_KEY or its own login.

wandb.log returns before anything is sent, so rows count as sent when the run was finished. A follower that
was killed before that sends them again, as the same run with the same `_step`s, and wandb leaves out the
steps that it has. Steps that a resumed run repeats are shown twice, with their `STAGE/attempt`.
"""

from rollouts.errors import SinkRefused
from rollouts.trackers.sinks import Batch, RunInfo, Sink


def open_sink(run: RunInfo) -> Sink:
    """One run of a wandb project. Raises SinkRefused for a key that is missing or wrong, what wandb raises
    where the service does not answer.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    folder, environment = run.root / "trackers" / "wandb", run.environment
    folder.mkdir(exist_ok=True)
    quiet = ("silent", "x_disable_stats", "disable_git", "disable_code", "disable_job_creation")
    try:
        tracked_run = wandb.init(
            project=environment.get("WANDB_PROJECT") or "rollouts",
            id=run.id,
            name=environment.get("WANDB_NAME") or run.name,
            resume="allow",
            dir=str(folder),
            config=dict(run.config),
            # nothing of this process is worth recording: it is not the one that trains
            settings=wandb.Settings(console="off", **dict.fromkeys(quiet, True)),
        )
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        raise SinkRefused(f"{error}; set WANDB_API_KEY, or WANDB_MODE=offline") from error
    axes = set()  # whose axis is defined

    def send(rows: Batch) -> None:
        """Hands the rows to wandb's own process."""
        for tracked in rows:
            axis = f"{tracked.row['stage']}/step"
            if axis not in axes:
                tracked_run.define_metric(f"{tracked.row['stage']}/*", step_metric=axis)
                axes.add(axis)
            tracked_run.log({**tracked.staged_metrics(), axis: tracked.row["step"]}, step=tracked.number)

    def close() -> None:
        """Returns when the service has everything, or the file of a run that is offline."""
        tracked_run.finish()
        # finish may return before wandb's own process has written the end of its file, and that is killed
        # after this one
        wandb.teardown()

    return Sink(send, close)
