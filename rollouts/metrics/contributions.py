"""What went into each update of the weights: a row of contributions.jsonl per trained sample, a line of updates.log per update.

    training loop ──UpdateRecord──► log_updates ──► tokens/*.bin, contributions.jsonl, updates.log

Rows and lines are made where they are written, off the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.types import BoolArray, FloatArray, ForwardBackwardResult, IntArray, OptimStepResult, RolloutBatch, metric_values

DIGITS = 9  # significant ones of a row's numbers, which come from float32
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where the arrays of a row lie."""

    shard: str  # file name
    offset: int  # bytes
    length: int  # T


def make_contribution_rows(update: UpdateRecord, places: Sequence[Place] = ()) -> list[dict[str, Any]]:
    """What each row of the update says after its head, in the order of the batch; none of an update that has none.

    `places`: of every row, or empty where no arrays are kept. Shares of an update that changed nothing are 0; where a
    backend gives no per-token arrays they are absent. See docs/run_directory.md.
    """
    if not update.contributes:
        return []
    batch, forward, traced = update.batch, update.forward, update.forward.per_token
    lengths, count = batch.response_lengths, len(batch)
    skipped = forward.skipped or update.optim.skipped
    shares = None
    if skipped is not None:
        shares = [0.0] * count
    elif traced is not None:
        shares = _compute_shares(traced.slopes)
    columns: dict[str, Sequence[Any] | None] = {  # made at once: a large batch has thousands of rows
        "update": [update.update] * count,
        "id": [sample.id for sample in batch.samples] if batch.samples else None,
        "group_index": None if batch.group_indices is None else batch.group_indices.tolist(),
        "row": range(count),
        "advantage": None if batch.advantages is None else _compute_means(batch.advantages, batch.loss_masks, lengths),
        "weight": None if traced is None or skipped is not None else _compute_means(traced.weights, batch.loss_masks, lengths),
        "share": shares,
        "tokens": lengths.tolist(),
        "reward": None if batch.rewards is None else _round(batch.rewards),
        "loss": None if forward.loss is None else [forward.loss] * count,
        "denominator": [forward.denominator] * count,
        "skipped": None if skipped is None else [skipped] * count,
    }
    if places:
        columns |= {name: [getattr(place, name) for place in places] for name in ("shard", "offset", "length")}
    held = {name: values for name, values in columns.items() if values is not None}
    rows = [dict(zip(held, values, strict=True)) for values in zip(*held.values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} if None in row.values() else row for row in rows]


def _compute_shares(slopes: Sequence[FloatArray]) -> list[float]:
    """Of each row; 0 for all where no slope is, or one is not finite: such an update changes nothing."""
    sums = _sum_rows(np.abs(np.concatenate(slopes)), slopes) if slopes else np.zeros(0)
    total = float(sums.sum())
    return _round(sums / total) if 0 < total < math.inf else [0.0] * len(slopes)


def _compute_means(values: Sequence[FloatArray], masks: Sequence[BoolArray], lengths: IntArray) -> list[float | None]:
    """Of each row over its trained tokens; 0 where there are none. None for a mean that is not finite, which JSON cannot say."""
    flat = np.where(np.concatenate(masks), np.concatenate(values), 0.0) if masks else np.zeros(0)
    means = _round(_sum_rows(flat, masks) / np.maximum(lengths, 1))
    return [mean if math.isfinite(mean) else None for mean in means]


def _sum_rows(flat: NDArray[Any], rows: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """[B] sums of the values that stand one row after the other in `flat`, 0.0 of an empty one. `rows`: of the same lengths."""
    sums = np.zeros(len(rows))
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    filled = np.flatnonzero(lengths)
    if len(filled):
        sums[filled] = np.add.reduceat(flat, np.cumsum(lengths[filled]) - lengths[filled], dtype=np.float64)
    return sums


def _round(values: NDArray[Any]) -> list[float]:
    """To DIGITS significant digits, in one call: one for each would take longer than all else that a row needs."""
    listed = values.tolist()
    return [float(text) for text in (f"%.{DIGITS}g " * len(listed) % tuple(listed)).split()]


# --- the audit log ---------------------------------------------------------------------------------------------------------------


def format_update(head: Mapping[str, Any], update: UpdateRecord) -> str:
    """The line of an update, without its newline. `head`: of a row, as make_head gives it.

    Names and values in columns, so that it reads by eye and splits at spaces; a value that the update does not have is "-".
    """
    forward, optim, metrics = update.forward, update.optim, metric_values(update.forward.metrics)
    time = datetime.fromtimestamp(head["time_unix"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    stage = f"{head['stage']}{'.' if update.part else ''}{update.part}"
    skipped = forward.skipped or optim.skipped
    left_out = int(metrics.get("advantage/skipped_rows", 0))
    fields = [
        time,
        f"attempt {head['attempt']:<2d}",
        f"{stage:<12s}",
        f"step {head['step']:>6d}",
        f"update {update.update:>3d}",
        f"version {head['policy_version'] + 1:>6d}",
        f"loss {_format(forward.loss, '+.6e'):>13s}",
        f"kl {_format(metrics.get('kl/ref'), '+.3e'):>10s}",
        f"beta {_format(update.kl_coef, '.3e'):>9s}",
        f"grad_norm {_format(optim.grad_norm, '.3e'):>9s} {describe_clipping(optim):<7s}",
        f"lr {optim.lr:.3e}",
        f"samples {len(update.batch):>5d}",
        f"zero_advantage {left_out:>5d}",
        f"tokens {int(update.batch.response_lengths.sum()):>8d}",
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
