"""What a tracker is to the follower: a sink that takes rows or says why not.

    files of the run ──► follower (rollouts.trackers.follower) ──► sink ──► the tracker's service or files

A module of a sink has `open_sink(run: RunInfo) -> Sink`. It is imported in the follower's worker process
alone, so that nobody else pays for the tracker's package.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollouts.errors import TrackerError
from rollouts.types import JSONValue

FILES = (
    "metrics",
    "evaluations",
    "spans",
    "samples",
)  # the files of a run that can be followed, in the order in which a batch has them
HEAD_FIELDS = frozenset({"schema", "stage", "step", "policy_version", "attempt", "time_unix", "name"})
Mark = Mapping[str, JSONValue]


@dataclass(frozen=True, slots=True)
class TrackedRow:
    """One row of a file of the run."""

    file: str  # of FILES
    row: Mapping[str, Any]  # as written: head and values
    # of all rows that this tracker was ever sent, from 0; a row that is sent again has the number it had
    number: int = 0
    aliases: Mapping[str, float] = field(
        default_factory=dict
    )  # its metrics under the names of another framework; see output.metric_aliases

    def staged_metrics(self) -> dict[str, float]:
        """metrics() for a service without stages: `STAGE/name`, for steps begin again with each stage;
        aliases as dashboards know them.
        """
        stage = self.row["stage"]
        return {**{f"{stage}/{name}": value for name, value in self.metrics().items()}, **self.aliases}

    def metrics(self) -> dict[str, float]:
        """The numbers of the row beside its head, by name; aliases are not among them."""
        return {
            name: value
            for name, value in self.row.items()
            if name not in HEAD_FIELDS and isinstance(value, int | float) and not isinstance(value, bool)
        }


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run that is followed."""

    # 32 hex digits, made when this tracker began to follow, kept with its position: what makes the run one in
    # the service
    id: str
    name: str  # of the run directory
    root: Path
    config: Mapping[str, Any]  # as resolved, what looks like a secret left out
    environment: Mapping[str, str]  # where keys and addresses come from
    mark: Mark | None = (
        None  # what `send` returned last before the position was stored; None at the beginning
    )


class Sink(Protocol):
    """Made by open_sink, used by one thread."""

    def send(self, rows: Sequence[TrackedRow]) -> Mark | None:
        """Returns when the service has the rows: at the latest after the kind's deadline, or the process is
        killed and the rows are sent again.

        Rows come in the order of each file. After a failure or a kill the sink is opened anew, and the first
        batch is exactly the rows of the last one, in the same order and with the same numbers (of one that
        confirms at close, all rows since it was opened come again). A mark is stored with the position, and
        handed back in RunInfo when the sink is opened again. Under `left_out` a mark may count values that
        the service took the batches without. Raises SinkUnavailable (tried again later), SinkRefused (a
        person must act: tried rarely) or RowsRefused (these rows are at fault: they come again in halves, and
        one that is refused alone is left out). Anything else counts as unavailable.
        """
        ...

    def close(self) -> None:
        """Gives back what the sink holds. Raises as send, where the service turns out not to have what was
        sent.
        """
        ...


@dataclass(frozen=True, slots=True)
class SinkKind:
    """A tracker that can be named in output.trackers."""

    module: str  # has open_sink
    files: tuple[str, ...]  # which rows it wants, of FILES
    packages: tuple[str, ...] = ()  # modules that must be importable
    extra: str = ""  # of this distribution, that installs them
    deadline_s: float = 60.0  # for opening, one batch or closing; what takes longer hangs
    batch_rows: int = 256  # most rows of one send
    confirms_at_close: bool = (
        False  # its library takes rows without saying whether the service has them, until it is closed
    )


SINKS: Mapping[str, SinkKind] = {
    "tensorboard": SinkKind(
        "rollouts.trackers.sink_tensorboard", ("metrics", "evaluations"), ("tensorboard",), "tensorboard"
    ),
    "trackio": SinkKind(
        "rollouts.trackers.sink_trackio", ("metrics", "evaluations"), ("trackio",), "trackio"
    ),
    "wandb": SinkKind(
        "rollouts.trackers.sink_wandb",
        ("metrics", "evaluations"),
        ("wandb",),
        "wandb",
        deadline_s=120.0,
        confirms_at_close=True,
    ),
    "mlflow": SinkKind("rollouts.trackers.sink_mlflow", ("metrics", "evaluations"), ("mlflow",), "mlflow"),
    "otlp": SinkKind(
        "rollouts.trackers.otlp", ("metrics", "evaluations", "spans"), ("opentelemetry.proto",), "otlp"
    ),
    "statsd": SinkKind("rollouts.trackers.statsd", ("metrics", "evaluations")),
    "prometheus": SinkKind("rollouts.trackers.prometheus", ("metrics", "evaluations")),
}


def find_missing(name: str) -> list[str]:
    """Modules that the tracker needs and this Python does not have. Imports no more than their parent
    packages.
    """
    missing: list[str] = []
    for module in SINKS[name].packages:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # of the parent package
            found = None
        if found is None:
            missing.append(module)
    return missing


def check_sink(name: str) -> None:
    """Raises TrackerError, with the command that installs it, if the tracker's package is missing."""
    missing = find_missing(name)
    if missing:
        install = f"pip install 'rollouts-rl[{SINKS[name].extra}]'"
        raise TrackerError(
            f"tracker {name} needs the package {missing[0].partition('.')[0]}, which is not installed:"
            f" {install}"
        )


def open_sink(name: str, run: RunInfo) -> Sink:
    """The sink of a kind. Raises TrackerError for a missing package, and as the sink's own open_sink."""
    check_sink(name)
    return importlib.import_module(SINKS[name].module).open_sink(run)
