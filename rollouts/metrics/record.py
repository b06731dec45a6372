"""One row of a metrics file, as a pure function of what happened."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rollouts.errors import MetricError
from rollouts.types import Metrics, metric_values

SCHEMA = 1  # raised when a field changes its meaning; new fields and metrics do not raise it
SEGMENT = r"[a-z0-9_]+(@[0-9]+)?"
BARE_NAMES = frozenset({"clip_ratio"})  # the share itself, above its parts clip_ratio/low and clip_ratio/high
METRIC_NAME = re.compile(rf"[a-z][a-z0-9_]*(/{SEGMENT}){{1,4}}")


def check_metric(name: str, value: object) -> float:
    """The value as a float. Raises MetricError, naming the metric, for a name out of form or a value that is not a finite number."""
    if not isinstance(name, str) or not (METRIC_NAME.fullmatch(name) or name in BARE_NAMES):
        raise MetricError(
            f"metric {name!r} = {value!r}: a name is <area>/<name>[/<stat>] in lower_snake, a stat may end in @k; for example reward/format/mean"
        )
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]  (whatever does not convert is refused below)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise MetricError(f"metric {name} = {value!r}: a value is a finite number; leave out a metric that has none in this step")
    return number


def flatten_metrics(metrics: Metrics) -> dict[str, float]:
    """Plain checked numbers of mergeable metrics; a metric without a value (a mean of nothing) is absent. Raises MetricError."""
    return {name: check_metric(name, value) for name, value in metric_values(metrics).items()}


def make_head(stage: str, step: int, policy_version: int, attempt: int, time_unix: float) -> dict[str, Any]:
    """The fields that every row of every file begins with."""
    assert stage and step >= 0 and attempt >= 1, (stage, step, attempt)
    return {
        "schema": SCHEMA,
        "stage": stage,
        "step": step,
        "policy_version": policy_version,
        "attempt": attempt,
        "time_unix": round(time_unix, 3),
    }


def make_row(
    stage: str, step: int, policy_version: int, attempt: int, time_unix: float, metrics: Mapping[str, float], *, name: str | None = None
) -> dict[str, Any]:
    """One row: the head, `name` for an evaluation, then the metrics, flat and in the order given (their slash keeps them apart from fields).

    Raises MetricError naming the metric whose name or value may not be written.
    """
    row = make_head(stage, step, policy_version, attempt, time_unix)
    if name is not None:
        row["name"] = name
    return row | {metric: check_metric(metric, value) for metric, value in metrics.items()}
