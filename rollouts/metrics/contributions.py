"""What went into each update of the weights: a row of contributions.jsonl per trained sample, a line of
updates.log per update.

    training loop ──UpdateRecord──► log_step ──► tokens/*.bin, contributions.jsonl, updates.log

Rows and lines are made where they are written, off the event loop.
"""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollouts.metrics.record import Fields, encode_rows
from rollouts.types import FloatArray, ForwardBackwardResult, OptimStepResult, RolloutBatch, Sample


class UpdateRecord(NamedTuple):
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


def encode_contributions(head: Fields, update: UpdateRecord, places: Sequence[Place] = ()) -> bytes:
    """The rows of the update as lines, in the order of the batch; none of an update that has none.

    `places`: of every row, or empty where no arrays are kept. Advantages and weights are 0 where the mask is
    0. Shares of an update that changed nothing are 0; where a backend gives no per-token arrays they are
    absent. See docs/run_directory.md.

    Raises MetricError for a reward that is not finite.
    """
    if not update.contributes:
        return b""
    batch, forward, traced = update.batch, update.forward, update.forward.per_token
    skipped = forward.skipped or update.optim.skipped
    weights = shares = None
    if skipped is not None:
        shares = np.zeros(len(batch))
    elif traced is not None:
        weights = _sum_rows(traced.weights) / np.maximum(batch.response_lengths, 1)
        shares = _compute_shares(traced.slopes)
    assert batch.group_indices is not None, "a policy trains on groups"
    columns: dict[str, Iterable[Any]] = {
        "id": [sample.id for sample in batch.samples] or repeat(None),
        "group_index": batch.group_indices.tolist(),
        "row": range(len(batch)),
        "advantage": _list_finite(batch.mean_advantages),
        "weight": _list_finite(weights),
        "share": _list_finite(shares),
        "tokens": batch.response_lengths.tolist(),
        "reward": repeat(None) if batch.rewards is None else _list_rewards(batch.rewards, batch.samples),
        **dict(zip(Place._fields, zip(*places, strict=True), strict=False)),
    }
    shared = {
        **head,
        "update": update.update,
        "loss": forward.loss,
        "denominator": forward.denominator,
        "skipped": skipped,
    }
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=False))
    return encode_rows(
        [{name: value for name, value in (shared | row).items() if value is not None} for row in rows]
    )


def _compute_shares(slopes: Sequence[FloatArray]) -> NDArray[np.float64]:
    """Of each row; 0 for all where no slope is, or one is not finite: such an update changes nothing."""
    sums = _sum_rows([np.abs(row) for row in slopes])
    total = float(sums.sum())
    return sums / total if 0 < total < math.inf else np.zeros(len(slopes))


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


def _list_finite(values: NDArray[Any] | None) -> Iterable[float | None]:
    """A column; None for a number that is not finite, which JSON cannot say, and where there are none."""
    if values is None:
        return repeat(None)
    return [value if math.isfinite(value) else None for value in values.tolist()]


# --- the audit log ------------------------------------------------------------------------------------------


def format_update(head: Fields, update: UpdateRecord) -> str:
    """The line of an update, without its newline. head: of a row, as make_head gives it.

    Names and values in columns, so that it reads by eye and splits at spaces; a value that the update does
    not have is "-".
    """
    forward, optim = update.forward, update.optim
    metrics = {name: metric.value for name, metric in forward.metrics.items()}
    skipped = forward.skipped or optim.skipped
    clipping = "-"  # there was no step to clip
    if optim.skipped is None and optim.grad_norm is not None:
        clipping = "clipped" if optim.clipped else "whole"

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    fields = [
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(head["time_unix"])),
        f"attempt {head['attempt']:<2d}",
        f"{head['stage'] + ('.' + update.part if update.part else ''):<12s}",
        f"step {head['step']:>6d}",
        f"update {update.update:>3d}",
        f"version {head['policy_version'] + 1:>6d}",
        f"loss {show(forward.loss, '+.6e'):>13s}",
        f"kl {show(metrics.get('kl/ref'), '+.3e'):>10s}",
        f"beta {show(update.kl_coef, '.3e'):>9s}",
        f"grad_norm {show(optim.grad_norm, '.3e'):>9s} {clipping:<7s}",
        f"lr {optim.lr:.3e}",
        f"samples {len(update.batch):>5d}",
        f"zero_advantage {int(metrics.get('advantage/skipped_rows') or 0):>5d}",
        f"tokens {int(update.batch.response_lengths.sum()):>8d}",
        *([] if skipped is None else [f"skipped: {' '.join(skipped.split())}"]),
    ]
    return "  ".join(fields)
