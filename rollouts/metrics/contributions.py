"""What went into each update of the weights: a row of contributions.jsonl per trained sample, a line of
updates.log per update.

    training loop ──UpdateRecord──► log_step ──► tokens/*.bin, contributions.jsonl, updates.log

Rows and lines are made where they are written, off the event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from rollouts.metrics.record import encode_rows
from rollouts.types import FloatArray, ForwardBackwardResult, IntArray, OptimStepResult, RolloutBatch, Sample

LACKING = repeat(UNSET)  # a column that an update does not have
NONE = "-"  # in a line: what the update does not have


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateRecord:
    """One optimizer update, as the record is told of it."""

    update: int  # index within the step, from 0
    batch: RolloutBatch  # what it was made of
    forward: ForwardBackwardResult
    optim: OptimStepResult
    kl_coef: float | None = None  # β of the KL term; None where no reference was asked
    part: str = ""  # what was updated, where a stage trains more than the policy: "critic"
    contributes: bool = False  # its rows go to contributions.jsonl: those of a policy, with advantages


class Place(NamedTuple):
    """Where the arrays of a row lie."""

    shard: str  # file name
    offset: int  # bytes
    length: int  # T


class _Row(msgspec.Struct, omit_defaults=True):
    """What one row says for itself; what it lacks is left out."""

    id: str | UnsetType = UNSET
    group_index: int | UnsetType = UNSET
    row: int | UnsetType = UNSET
    advantage: float | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    share: float | UnsetType = UNSET
    tokens: int | UnsetType = UNSET
    reward: float | UnsetType = UNSET
    shard: str | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    length: int | UnsetType = UNSET


def encode_contributions(
    head: Mapping[str, Any], update: UpdateRecord, lengths: IntArray, places: Sequence[Place] = ()
) -> bytes:
    """The rows of the update as lines, in the order of the batch; none of an update that has none. lengths:
    [B] tokens that train.

    `places`: of every row, or empty where no arrays are kept. Advantages and weights are 0 where the mask is
    0. Shares of an update that changed nothing are 0; where a backend gives no per-token arrays they are
    absent. See docs/run_directory.md.

    Raises MetricError for a reward that is not finite.
    """
    if not update.contributes:
        return b""
    batch, forward, traced = update.batch, update.forward, update.forward.per_token
    count = len(batch)
    skipped = forward.skipped or update.optim.skipped
    weights = shares = None
    if skipped is not None:
        shares = np.zeros(count)
    elif traced is not None:
        weights, shares = _compute_means(traced.weights, lengths), _compute_shares(traced.slopes)
    columns: Iterable[Iterable[Any]] = (  # made at once: a large batch has thousands of rows
        [sample.id for sample in batch.samples] if batch.samples else LACKING,
        LACKING if batch.group_indices is None else batch.group_indices.tolist(),
        range(count),
        _list(_find_advantages(batch, lengths)),
        _list(weights),
        _list(shares),
        lengths.tolist(),
        LACKING if batch.rewards is None else _list_rewards(batch.rewards, batch.samples),
        *(zip(*places, strict=True) if places else (LACKING, LACKING, LACKING)),
    )
    shared = {
        "update": update.update,
        "loss": forward.loss,
        "denominator": forward.denominator,
        "skipped": skipped,
    }
    known = {name: value for name, value in shared.items() if value is not None}
    rows = list(map(_Row, *columns))
    assert len(rows) == count, (len(rows), count)
    return encode_rows(rows, head={**head, **known})


def _find_advantages(batch: RolloutBatch, lengths: IntArray) -> NDArray[Any] | None:
    """[B] the mean of each row; nothing where the batch has no advantages."""
    if batch.mean_advantages is not None:
        return batch.mean_advantages
    return None if batch.advantages is None else _compute_means(batch.advantages, lengths)


def _compute_shares(slopes: Sequence[FloatArray]) -> NDArray[np.float64]:
    """Of each row; 0 for all where no slope is, or one is not finite: such an update changes nothing."""
    sums = _sum_rows([np.abs(row) for row in slopes])
    total = float(sums.sum())
    return sums / total if 0 < total < math.inf else np.zeros(len(slopes))


def _compute_means(values: Sequence[FloatArray], lengths: IntArray) -> NDArray[np.float64]:
    """Of each row over so many tokens, all others being 0; 0 of none."""
    return _sum_rows(values) / np.maximum(lengths, 1)


def _sum_rows(rows: Sequence[FloatArray]) -> NDArray[np.float64]:
    """[B] sums, in float32. By BLAS, row by row, which touches each value once and asks for no memory: this
    is most of what a row costs.
    """
    ones = np.ones(max(map(len, rows), default=0), np.float32)
    return np.fromiter((np.vdot(row, ones[: len(row)]) for row in rows), np.float64, len(rows))


def _list_rewards(rewards: FloatArray, samples: Sequence[Sample]) -> list[float | None]:
    """Those that trained; with the digits of samples.jsonl where they are the samples' own, which the batch
    has in float32.
    """
    own = [sample.reward for sample in samples]
    return own if np.array_equal(np.asarray(own, np.float32), rewards) else rewards.tolist()


def _list(values: NDArray[Any] | None) -> Iterable[Any]:
    """A column; UNSET for a number that is not finite, which JSON cannot say."""
    if values is None:
        return LACKING
    return (
        values.tolist()
        if np.isfinite(values).all()
        else [value if math.isfinite(value) else UNSET for value in values.tolist()]
    )


# --- the audit log ------------------------------------------------------------------------------------------


def format_update(head: Mapping[str, Any], update: UpdateRecord, lengths: IntArray) -> str:
    """The line of an update, without its newline. head: of a row, as make_head gives it; lengths: [B] tokens
    that train.

    Names and values in columns, so that it reads by eye and splits at spaces; a value that the update does
    not have is "-".
    """
    forward, optim = update.forward, update.optim
    kl, left_out = (
        metric.value if (metric := forward.metrics.get(name)) else None
        for name in ("kl/ref", "advantage/skipped_rows")
    )
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(head["time_unix"]))
    stage = f"{head['stage']}{'.' if update.part else ''}{update.part}"
    skipped = forward.skipped or optim.skipped
    fields = [
        written,
        f"attempt {head['attempt']:<2d}",
        f"{stage:<12s}",
        f"step {head['step']:>6d}",
        f"update {update.update:>3d}",
        f"version {head['policy_version'] + 1:>6d}",
        f"loss {_format(forward.loss, '+.6e'):>13s}",
        f"kl {_format(kl, '+.3e'):>10s}",
        f"beta {_format(update.kl_coef, '.3e'):>9s}",
        f"grad_norm {_format(optim.grad_norm, '.3e'):>9s} {describe_clipping(optim):<7s}",
        f"lr {optim.lr:.3e}",
        f"samples {len(update.batch):>5d}",
        f"zero_advantage {int(left_out or 0):>5d}",
        f"tokens {int(lengths.sum()):>8d}",
    ]
    line = "  ".join(fields)
    return line if skipped is None else f"{line}  skipped: {' '.join(skipped.split())}"


def describe_clipping(optim: OptimStepResult) -> str:
    """One word; "-" where there was no step to clip."""
    if optim.skipped is not None or optim.grad_norm is None:
        return NONE
    return "clipped" if optim.clipped else "whole"


def _format(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
