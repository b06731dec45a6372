"""A step computed again and compared, update by update and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollouts.config.load import load_recorded
from rollouts.config.schema import RLTrainingConfig
from rollouts.errors import RecordError
from rollouts.loops.algorithm import LoopState, choose_algorithm, describe_algorithm
from rollouts.loops.updates import begin_last_pass
from rollouts.metrics.token_shards import read_token_arrays
from rollouts.replay.recompute import Columns, check_replayable, recompute
from rollouts.replay.record import StepRecord, read_step
from rollouts.run_dir import RunDir
from rollouts.types import LossSpec

TOLERANCE = 1e-5  # of a loss relative to max(FLOOR, |loss|), and of a share
FLOOR = 1e-3
DENOMINATOR_TOLERANCE = 1e-6
ROUNDING = 2.0**-24  # of float32, in which the loss was computed: what terms that cancel leave of their size


@dataclass(frozen=True, slots=True)
class ReplayedLoss:
    """The loss of an update, or of the step, as it was logged and as it was computed again."""

    name: str  # the number of the update, or loss/total
    rows: int
    tokens: int
    logged: float | None  # None: it was not finite, and the update changed nothing
    replayed: float = 0.0
    rounding: float = 0.0  # what float32 may have made of `logged` beside: ROUNDING of the size of its terms
    denominator: float = 1.0  # as computed again
    share_difference: float | None = None  # the largest of a row; None: no share was logged

    @property
    def difference(self) -> float:
        """Relative to the larger of 1e-3 and the loss."""
        return abs((self.logged or 0.0) - self.replayed) / max(FLOOR, abs(self.logged or 0.0))

    @property
    def is_same(self) -> bool:
        """Whether loss and shares are. A NaN is never the same."""
        if self.logged is None:
            return True
        allowed = TOLERANCE * max(FLOOR, abs(self.logged)) + self.rounding
        close = abs(self.logged - self.replayed) <= allowed
        return close and not (self.share_difference or 0.0) > TOLERANCE


class StepReplay(NamedTuple):
    """A step."""

    algorithm: str  # in words
    # of the updates; and of loss/total, where all updates were asked for and it was logged
    losses: Sequence[ReplayedLoss]
    problems: Sequence[str]

    @property
    def is_same(self) -> bool:
        """Whether all of it is."""
        return not self.problems and all(one.is_same for one in self.losses)


def replay_step(root: Path, *, stage: str, step: int, update: int | None = None) -> StepReplay:
    """The step's losses from the record alone. `update`: only this one.

    Raises RecordError naming what the record lacks, or a loss that cannot be replayed; ConfigError,
    PlugInError and RunDirError as what reads the config, the loss and the files.
    """
    if stage != "rl":
        raise RecordError(f"stage {stage!r} has no contributions, which a replay needs; it replays rl")
    run_dir = RunDir(root)
    record = read_step(run_dir, stage, step)
    config = load_recorded(run_dir.config).rl
    if config is None:
        raise RecordError(f"{run_dir.config} has no [rl]; it is not of the run that wrote the record")
    logged = record.metrics.get("kl/coef")
    if config.kl_control != "fixed" and logged is None:
        raise RecordError(
            f"step {step} has no kl/coef, to which rl.kl_control={config.kl_control!r} had come; it cannot be"
            " computed again"
        )
    state = LoopState(kl_coef=config.kl_coef if logged is None else float(logged))
    algorithm = choose_algorithm(config, step, state)
    check_replayable(algorithm.loss)
    count = len(record.updates)
    chosen = range(count) if update is None else [number for number in range(count) if number == update]
    if not chosen:
        raise RecordError(f"{stage} step {step} has the updates 0 to {count - 1}, not {update}")
    problems: list[str] = []
    losses = [replay_update(run_dir, config, algorithm.loss, record, one, problems) for one in chosen]
    logged = record.metrics.get("loss/total")
    # of the last pass: Σ loss · denominator / Σ denominator over its updates that were not skipped
    counted = [one for one in losses[begin_last_pass(count, config.minibatches) :] if one.logged is not None]
    if len(losses) == count and counted and logged is not None:
        weights = [one.denominator for one in counted]
        losses.append(
            ReplayedLoss(
                "loss/total",
                sum(one.rows for one in counted),
                sum(one.tokens for one in counted),
                float(logged),
                float(np.average([one.replayed for one in counted], weights=weights)),
                float(np.average([one.rounding for one in counted], weights=weights)),
            )
        )
    return StepReplay(describe_algorithm(algorithm), losses, problems)


def replay_update(
    run_dir: RunDir,
    config: RLTrainingConfig,
    loss: LossSpec,
    record: StepRecord,
    update: int,
    problems: list[str],
) -> ReplayedLoss:
    """One update. `problems` is told of a denominator that is not the logged one. Raises RecordError for
    arrays that are not there.
    """
    logged_rows = record.updates[update]
    first, tokens = logged_rows[0], sum(int(row["tokens"]) for row in logged_rows)
    if first.get("loss") is None:
        return ReplayedLoss(str(update), len(logged_rows), tokens, None)
    rows: list[Columns] = [read_token_arrays(run_dir, row) for row in logged_rows]
    if any("log_prob" not in row for row in rows):
        raise RecordError(
            f"step {first['step']}, update {update}: the backend gave no per-token arrays, which a replay"
            " needs"
        )
    found = recompute(loss, rows)
    denominator = find_constant(config, loss, record, update) or found.counted
    if abs(denominator - first["denominator"]) > DENOMINATOR_TOLERANCE * first["denominator"]:
        problems.append(
            f"update {update} was divided by {first['denominator']:g}; by the record it should be"
            f" {denominator:g} {loss.unit}"
        )
    logged = [row.get("share") for row in logged_rows]
    difference, whole = None, float(found.slopes.sum())
    if None not in logged and "skipped" not in first:  # the shares of a skipped update are 0
        shares = found.slopes / whole if 0 < whole < np.inf else np.zeros(len(rows))
        difference = float(np.abs(shares - np.asarray(logged, np.float64)).max())
    return ReplayedLoss(
        str(update),
        len(rows),
        tokens,
        first["loss"],
        found.total / denominator,
        ROUNDING * whole / denominator,
        denominator,
        difference,
    )


def find_constant(config: RLTrainingConfig, loss: LossSpec, record: StepRecord, update: int) -> float | None:
    """The denominator of unit "constant": the update's part of it by groups, as plan_updates has it. None for
    another unit.

    Where kl_stop left updates out, groups of the batch may be in none that was made: what was logged stands
    then.
    """
    if loss.constant is None or config.minibatches == 1:
        return loss.constant
    if config.kl_stop and len(record.updates) < config.minibatches * config.updates_per_batch:
        return float(record.updates[update][0]["denominator"])
    groups = [{row["group_index"] for row in rows} for rows in record.updates]
    return loss.constant * (len(groups[update]) / len(set.union(*groups)))
