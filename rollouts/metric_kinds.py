"""Metric values that merge: what parts of a batch measured becomes what the whole would have."""

from collections.abc import Iterable, Mapping
from operator import add
from typing import Any, NamedTuple, TypeVar, cast

KindT = TypeVar("KindT", "Mean", "Total", "EffectiveShare", "ExplainedVariance")


def _add_sums(one: KindT, other: KindT) -> KindT:
    return type(one)(*map(add, one, other))


class Mean(NamedTuple):
    """A mean that carries its count, so that means of parts merge exactly."""

    total: float
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    merge = _add_sums

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class Total(NamedTuple):
    """A sum over parts."""

    value: float
    merge = _add_sums


class Max(NamedTuple):
    """The largest of the parts."""

    value: float

    def merge(self, other: "Max") -> "Max":
        return max(self, other)


class Min(NamedTuple):
    """The smallest of the parts."""

    value: float

    def merge(self, other: "Min") -> "Min":
        return min(self, other)


class EffectiveShare(NamedTuple):
    """Effective sample size of weights over their number, (Σw)² / (n Σw²): 1 when all are equal. Sums merge;
    the share of parts would not.
    """

    total: float  # Σw
    square: float  # Σw²
    # n
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    merge = _add_sums

    @property
    def value(self) -> float | None:
        return self.total**2 / (self.count * self.square) if self.count * self.square > 0 else None


class ExplainedVariance(NamedTuple):
    """1 − Var(target − prediction) / Var(target), biased variances of both: 1 is perfect, 0 no better than
    the mean. None for constant targets.
    """

    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    target: float  # Σ target
    target_square: float  # Σ target²
    error: float  # Σ (target − prediction)
    error_square: float  # Σ (target − prediction)²
    merge = _add_sums

    @property
    def value(self) -> float | None:
        spread = self.count * self.target_square - self.target**2  # count² times the variance
        rounding = 1e-12 * self.count * self.target_square  # of the difference of two sums
        return 1.0 - (self.count * self.error_square - self.error**2) / spread if spread > rounding else None


Metric = Mean | Total | Max | Min | EffectiveShare | ExplainedVariance
Metrics = Mapping[str, Metric]


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """One mapping in which metrics of the same name are merged. Raises ValueError if a name has two kinds."""
    merged = {}
    for part in parts:
        for name, metric in part.items():
            held = merged.get(name, metric)
            if type(held) is not type(metric):
                raise ValueError(
                    f"metric {name} is a {type(held).__name__} in one part and a {type(metric).__name__} in"
                    " another"
                )
            merged[name] = held.merge(cast(Any, metric)) if name in merged else metric
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers; a metric without a value (a mean of nothing) is absent."""
    return {name: value for name, metric in metrics.items() if (value := metric.value) is not None}
