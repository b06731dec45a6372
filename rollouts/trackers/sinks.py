"""What a tracker is to the follower: a sink that takes rows or says why not.

A module of a sink has `open_sink(run: RunInfo) -> Sink`. Only the follower's process imports it.
"""

import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.errors import ConfigError, SinkRefused
from rollouts.metrics.jsonl import Place
from rollouts.metrics.names import find_metric
from rollouts.protocols import Say
from rollouts.types import Fields, Numbers, Texts

HEAD_FIELDS = frozenset({"schema", "stage", "step", "policy_version", "attempt", "time_unix", "name"})
Mark = dict[str, Any]  # JSON values


class TrackedRow(NamedTuple):
    """One row of a file of the run."""

    file: str  # metrics, evaluations or spans
    row: Fields  # as written: head and values
    number: int = 0  # of all rows that this tracker was sent, from 0
    end: Place = Place()  # where the next row of the file begins

    @property
    def key(self) -> str:
        """Tells the row from all others of the run, also when it is sent again."""
        return f"{self.file}-{self.end.part}-{self.end.offset}"

    def metrics(self, *head: str) -> Numbers:
        """The numbers of the row by name: these of its head, and those beside its head."""
        return {
            name: of
            for name, of in self.row.items()
            if (name not in HEAD_FIELDS or name in head) and type(of) in (int, float)
        }

    def staged_metrics(self) -> Numbers:
        """The numbers as `STAGE/name`, and `STAGE/attempt`, for a service without stages: steps begin again
        with each stage.
        """
        return {f"{self.row['stage']}/{name}": value for name, value in self.metrics("attempt").items()}

    def labels(self) -> dict[str, Any]:
        """Stage and attempt, and the name of an evaluation, for a service with labels."""
        named = {"evaluation": self.row["name"]} if self.file == "evaluations" else {}
        return {"stage": self.row["stage"], "attempt": self.row["attempt"], **named}


Batch = Sequence[TrackedRow]  # rows that are sent at once; of each file in its order


class RunInfo(NamedTuple):
    """The run that is followed."""

    id: str  # 32 hex digits, kept with the position: what makes the run one in the service
    name: str  # of the run directory
    root: Path
    config: Fields  # as resolved, without secrets
    environment: Texts  # where keys and addresses come from
    mark: Mark = {}  # what `send` returned last before the position was stored
    say: Say = print  # to whoever follows the run

    def read_port(self, variable: str, default: str) -> int:
        """The port that a variable names. Raises SinkRefused for one that is none."""
        text = self.environment.get(variable) or default
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise SinkRefused(f"{variable}={text!r} is no port; give a number from 1 to 65535")
        return int(text)


class Sink(NamedTuple):
    """Made by open_sink, used by one call at a time."""

    # Returns when the service has the rows; a mark is stored with the position, for the next open_sink. Under
    # `left_out` it may count values that the service did not take.
    #
    # After a failure the sink is opened anew and the rows come again, in the order of each file. Raises
    # SinkUnavailable (tried again later), SinkRefused (a person must act: tried rarely) or RowsRefused (these
    # rows are at fault: they come again in halves, and one that is refused alone is left out). Anything else
    # counts as unavailable.
    send: Callable[[Batch], Mark | None]
    close: Callable[[], object] = lambda: None  # gives back what the sink holds; raises as send


class SinkKind(NamedTuple):
    """A tracker that can be named in output.trackers, and how it is fed."""

    package: str  # module that must be importable
    files: tuple[str, ...] = ("metrics", "evaluations")  # of which rows are sent
    deadline_s: float = 60.0  # for opening, one batch or closing; what takes longer hangs
    batch_rows: int = 256  # most rows of one send
    confirms_at_close: bool = False  # its library says only then whether the service has the rows


ALERTS = "alerts"  # the sink of [[alerts]], no service
SINKS = {
    "tensorboard": SinkKind("tensorboard"),
    "trackio": SinkKind("trackio"),
    "wandb": SinkKind("wandb", deadline_s=120.0, confirms_at_close=True),
    "mlflow": SinkKind("mlflow"),
    "otlp": SinkKind("opentelemetry.exporter.otlp.proto.http", ("metrics", "evaluations", "spans")),
    "statsd": SinkKind("datadog"),
    "prometheus": SinkKind("prometheus_client"),
    ALERTS: SinkKind("httpx", deadline_s=math.inf, batch_rows=1),
}


def check_trackers(names: Sequence[str], *, setting: str = "output.trackers") -> None:
    """Raises ConfigError, with the command that installs it, if a tracker's package is missing."""
    for name in names:
        package = SINKS[name].package
        with suppress(ModuleNotFoundError):  # of the parent package
            if importlib.util.find_spec(package):
                continue
        raise ConfigError(
            f"{setting}: {name} needs the package {package}, which is not installed: pip install"
            f" 'rollouts-rl[{name}]'"
        )


def open_sink(name: str, run: RunInfo) -> Sink:
    """The sink of a kind. Raises as the sink's own open_sink."""
    return importlib.import_module(f"rollouts.trackers.sink_{name}").open_sink(run)


def clean_name(name: str, separator: str) -> str:
    """A metric's name with the separator for slashes and only letters, digits, dots and underscores else:
    `eval/x/avg@4` becomes `eval.x.avg_at_4`.
    """
    return re.sub(rf"[^A-Za-z0-9_.{separator}]", "_", name.replace("/", separator).replace("@", "_at_"))


def describe_metric(name: str) -> str:
    """What a metric means, and its unit; its name where it is not ours."""
    known = find_metric(name)
    return f"{known.meaning}{f' ({known.unit})' if known.unit else ''}" if known else name
