"""A step computed again and compared, update by update and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
class LossPair:
    """A loss as it was logged and as it was computed again."""

    logged: float
    replayed: float
    rounding: float  # what float32 may have made of the logged one beside: ROUNDING of the size of its terms

    @property
    def difference(self) -> float:
        """Relative to the larger of 1e-3 and the loss."""
        return abs(self.logged - self.replayed) / max(FLOOR, abs(self.logged))

    @property
    def is_same(self) -> bool:
        """Whether the losses are. A NaN is never the same."""
        return abs(self.logged - self.replayed) <= TOLERANCE * max(FLOOR, abs(self.logged)) + self.rounding


@dataclass(frozen=True, slots=True)
class UpdateReplay:
    """One update."""

    update: int
    rows: int
    tokens: int
    denominator: float = 1.0  # as computed again
    loss: LossPair | None = None  # None: it was not finite, and the update changed nothing
    share_difference: float | None = None  # the largest of a row; None: no share was logged

    @property
    def is_same(self) -> bool:
        """Of loss and shares."""
        return self.loss is None or (self.loss.is_same and not (self.share_difference or 0.0) > TOLERANCE)


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step."""

    stage: str
    step: int
    algorithm: str  # in words
    updates: Sequence[UpdateReplay]
    # of loss/total; None where not all updates were asked for, or it was not logged because all were skipped
    total: LossPair | None
    problems: Sequence[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether all of it is."""
        return (
            not self.problems
            and all(one.is_same for one in self.updates)
            and (self.total is None or self.total.is_same)
        )


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
    replays = [replay_update(run_dir, config, algorithm.loss, record, one, problems) for one in chosen]
    total = compare_total(config, record, replays) if len(replays) == count else None
    return StepReplay(stage, step, describe_algorithm(algorithm), replays, total, problems)


def replay_update(
    run_dir: RunDir,
    config: RLTrainingConfig,
    loss: LossSpec,
    record: StepRecord,
    update: int,
    problems: list[str],
) -> UpdateReplay:
    """One update. `problems` is told of a denominator that is not the logged one. Raises RecordError for
    arrays that are not there.
    """
    logged_rows = record.updates[update]
    first, tokens = logged_rows[0], sum(int(row["tokens"]) for row in logged_rows)
    if first.get("loss") is None:
        return UpdateReplay(update, len(logged_rows), tokens)
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
    pair = LossPair(first["loss"], found.total / denominator, ROUNDING * whole / denominator)
    return UpdateReplay(update, len(rows), tokens, denominator, pair, difference)


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


def compare_total(
    config: RLTrainingConfig, record: StepRecord, replays: Sequence[UpdateReplay]
) -> LossPair | None:
    """loss/total, which is of the last pass: Σ loss · denominator / Σ denominator over its updates that were
    not skipped.
    """
    logged = record.metrics.get("loss/total")
    last_pass = replays[begin_last_pass(len(replays), config.minibatches) :]
    counted = [(one.loss, one.denominator) for one in last_pass if one.loss is not None]
    if logged is None or not counted:
        return None
    whole = sum(weight for _, weight in counted)
    replayed = sum(pair.replayed * weight for pair, weight in counted) / whole
    return LossPair(float(logged), replayed, sum(pair.rounding * weight for pair, weight in counted) / whole)
