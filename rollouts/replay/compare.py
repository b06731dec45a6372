"""A step computed again in float64 from its record, and compared, update by update and as a whole."""

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.config.load import load_recorded
from rollouts.config.schema import RLTrainingConfig
from rollouts.errors import RecordError, RolloutsError, RunDirError
from rollouts.loops.algorithm import LoopState, choose_algorithm, describe_algorithm
from rollouts.loops.updates import begin_last_pass
from rollouts.losses import LossInputs, resolve_loss, wants_entropy_gradient
from rollouts.metrics.jsonl import Place, Row, newest_attempts, parse_row, read_lines
from rollouts.metrics.token_shards import read_token_arrays
from rollouts.run_dir import RunDir, part_path
from rollouts.types import LOSS_FIELDS, Fields, LossSpec

Columns = Mapping[str, NDArray[Any]]  # [T] of one row, by name
Updates = list[list[Row]]  # of a step: the rows of contributions.jsonl, in the order of the batch
CHOOSE_AMONG_MICRO_BATCH = ("clip_cov", "kl_cov")
TOLERANCE = 1e-5  # of a loss relative to max(FLOOR, |loss|), and of a share
FLOOR = 1e-3
DENOMINATOR_TOLERANCE = 1e-6
ROUNDING = 2.0**-24  # of float32, in which the loss was computed: what terms that cancel leave of their size


class ReplayedLoss(NamedTuple):
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
        close = self.difference <= TOLERANCE + self.rounding / max(FLOOR, abs(self.logged))
        return close and not (self.share_difference or 0.0) > TOLERANCE


class StepReplay(NamedTuple):
    """A step."""

    algorithm: str  # in words
    # of the updates; and of loss/total, where all updates were asked for and it was logged
    losses: Sequence[ReplayedLoss]
    problems: Sequence[str]


def run_replay(arguments: Namespace) -> int:
    """Prints a table: 0 where loss and shares are the same, 1 where they are not, 2 where the record lacks
    what it takes.

    Raises ConfigError and PlugInError for a config.toml that cannot be read here, RunDirError for what is no
    run directory or is damaged.
    """
    try:
        replay = replay_step(
            arguments.run_dir,
            stage=arguments.stage,
            step=arguments.step,
            update=arguments.update,
            loss=arguments.loss,
        )
    except RecordError as error:
        print(f"RecordError: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.stage} step {arguments.step}: {replay.algorithm}\n")
    print(
        f"{'update':<10s} {'rows':>6s} {'tokens':>9s}  {'loss logged':>16s}  {'replayed':>16s} "
        f" {'differs':>8s}  {'shares':>8s}"
    )
    for one in replay.losses:
        found = "skipped: it changed nothing"
        if one.logged is not None:
            found = (
                f"{one.logged:>+16.9e}  {one.replayed:>+16.9e}  {one.difference:>8.1e}"
                f"  {'-' if one.share_difference is None else f'{one.share_difference:.1e}':>8s}"
                f"  {'same' if one.is_same else 'NOT THE SAME'}"
            )
        print(f"{one.name:<10s} {one.rows:>6d} {one.tokens:>9d}  {found}")
    for problem in replay.problems:
        print(problem)
    print(
        f"\nThe same is {TOLERANCE:g} or less: of a loss relative to max(1e-3, |loss|), beside float32's"
        " rounding of its terms; of a row's share."
    )
    return 0 if not replay.problems and all(one.is_same for one in replay.losses) else 1


def replay_step(root: Path, *, stage: str, step: int, update: int | None, loss: str = "") -> StepReplay:
    """The step's losses from the record alone. `update`: only this one. `loss`: a function that the config
    names too; without it none is imported, for a record may be anybody's.

    Raises RecordError naming what the record lacks, or a loss that cannot be replayed; ConfigError,
    PlugInError and RunDirError as what reads the config, the loss and the files.
    """
    if stage != "rl":
        raise RecordError(f"stage {stage!r} has no contributions, which a replay needs; it replays rl")
    run_dir = RunDir(root)
    metrics, updates = read_step(run_dir, stage, step)
    config = load_recorded(run_dir.config).rl
    if config is None:
        raise RecordError(f"{run_dir.config} has no [rl]; it is not of the run that wrote the record")
    if config.pairs:
        raise RecordError("rl.pairs trains by a loss of pairs, which the record cannot compute again")
    if config.kl_control != "fixed" and "kl/coef" not in metrics:
        raise RecordError(
            f"step {step} has no kl/coef, to which rl.kl_control={config.kl_control!r} had come; it cannot be"
            " computed again"
        )
    algorithm = choose_algorithm(config, step, LoopState(metrics.get("kl/coef", config.kl_coef)))
    if ":" in algorithm.loss.name and algorithm.loss.name != loss:
        raise RecordError(
            f"{run_dir.config} names the loss {algorithm.loss.name!r}, and nothing is imported because a"
            f" record says so; where you trust it, add --loss {shlex.quote(algorithm.loss.name)}"
        )
    check_replayable(algorithm.loss)
    count = len(updates)
    chosen = [number for number in range(count) if update in (None, number)]
    if not chosen:
        raise RecordError(f"{stage} step {step} has the updates 0 to {count - 1}, not {update}")
    problems = []
    losses = [replay_update(run_dir, config, algorithm.loss, updates, one, problems) for one in chosen]
    # of the last pass: Σ loss · denominator / Σ denominator over its updates that were not skipped
    counted = [one for one in losses[begin_last_pass(count, config.minibatches) :] if one.logged is not None]
    if len(losses) == count and counted and "loss/total" in metrics:
        losses.append(
            ReplayedLoss(
                "loss/total",
                sum(one.rows for one in counted),
                sum(one.tokens for one in counted),
                metrics["loss/total"],
                *np.average(
                    [(one.replayed, one.rounding) for one in counted],
                    0,
                    [one.denominator for one in counted],
                ).tolist(),
            )
        )
    return StepReplay(describe_algorithm(algorithm), losses, problems)


def replay_update(
    run_dir: RunDir,
    config: RLTrainingConfig,
    loss: LossSpec,
    updates: Updates,
    update: int,
    problems: list[str],
) -> ReplayedLoss:
    """One update. `problems` is told of a denominator that is not the logged one. Raises RecordError for
    arrays that are not there.
    """
    logged_rows = updates[update]
    first, tokens = logged_rows[0], sum(row["tokens"] for row in logged_rows)
    if first.get("loss") is None:
        return ReplayedLoss(str(update), len(logged_rows), tokens, None)
    rows = [read_token_arrays(run_dir, row) for row in logged_rows]
    if any("log_prob" not in row for row in rows):
        raise RecordError(
            f"step {first['step']}, update {update}: the backend gave no per-token arrays, which a replay"
            " needs"
        )
    found = recompute(loss, rows)
    denominator = find_constant(config, loss, updates, update) or found.counted
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


def find_constant(config: RLTrainingConfig, loss: LossSpec, updates: Updates, update: int) -> float | None:
    """The denominator of unit "constant": the update's part of it by groups, as plan_updates has it. None for
    another unit.

    Where kl_stop or kl_limit left updates out, groups of the batch may be in none that was made: what was
    logged stands then.
    """
    if loss.constant is None or config.minibatches == 1:
        return loss.constant
    may_end = config.kl_stop or config.kl_limit
    if may_end and len(updates) < config.minibatches * config.updates_per_batch:
        return updates[update][0]["denominator"]
    groups = [{row["group_index"] for row in rows} for rows in updates]
    return loss.constant * (len(groups[update]) / len(set.union(*groups)))


# --- what the record has ------------------------------------------------------------------------------------


def read_step(run_dir: RunDir, stage: str, step: int) -> tuple[Row, Updates]:
    """(the row of metrics.jsonl, the contribution rows of each update in the order of its batch) of the
    newest complete attempt at a step. Raises RunDirError where there is no run, RecordError where the
    record lacks rows of the step.
    """
    if not run_dir.metrics.exists():
        raise RunDirError(f"{run_dir.root} has no metrics.jsonl; name a run directory, for example runs/demo")
    steps = newest_attempts(find_rows(run_dir.metrics, stage, step))
    if not steps:
        raise RecordError(
            f"{run_dir.root} has no row of {stage} step {step}; it was not trained, or is not complete"
        )
    metrics = steps[-1]
    attempt = metrics.get("attempt")
    by_update = {}
    for row in find_rows(run_dir.contributions, stage, step):
        for name in ("loss", "denominator", "share", "tokens", "row", "update"):
            whole = name in ("tokens", "row", "update")
            if not isinstance(row.get(name), int if whole else int | float | None):
                raise RecordError(
                    f"{run_dir.contributions}: {name} of {stage} step {step} is {row.get(name)!r}, which is"
                    " no number; the file is damaged"
                )
        if row.get("attempt") == attempt:
            by_update.setdefault(row["update"], []).append(row)
    if not by_update:
        raise RecordError(
            f"{run_dir.contributions} has no row of {stage} step {step}, attempt {attempt}: only samples that"
            " RL trains on have any, and only in runs of a version that writes them"
        )
    if sorted(by_update) != list(range(len(by_update))):
        raise RecordError(
            f"{stage} step {step} has rows of the updates {sorted(by_update)}; some are missing"
        )
    updates = [sorted(by_update[number], key=lambda row: row["row"]) for number in sorted(by_update)]
    for number, rows in enumerate(updates):
        if [row["row"] for row in rows] != list(range(len(rows))):
            raise RecordError(
                f"{stage} step {step}, update {number}: rows are missing or stand twice in"
                " contributions.jsonl"
            )
    return metrics, updates


def find_rows(path: Path, stage: str, step: int) -> list[Row]:
    """The rows of a step of every attempt, in the order of the file; a torn last line is left out. Raises
    RecordError for a damaged one.

    Lines are told apart before they are parsed, for a long run has millions.
    """
    of_step = re.compile(rb'"step":\s*%d[,}]' % step)
    rows = []
    for line, after in read_lines(path, Place()):
        row = parse_row(line) if of_step.search(line) else {}
        if row is None:
            raise RecordError(
                f"{part_path(path, after.part)}: the line that ends at byte {after.offset}, of step {step},"
                " is damaged"
            )
        if row.get("step") == step and row.get("stage") == stage:
            rows.append(row)
    return rows


# --- a loss computed again ----------------------------------------------------------------------------------


class Recomputed(NamedTuple):
    """What a loss came to over the rows of an update."""

    total: float  # before the denominator
    counted: float  # of the loss's unit
    slopes: NDArray[np.float64]  # [B] sum over a row's tokens of |d total / d log-prob|


def check_replayable(spec: LossSpec) -> None:
    """Raises RecordError, naming it, for a loss that needs more than the record has; ConfigError and
    PlugInError as resolve_loss.
    """
    whole = spec.params.get("cov_fraction") == 1 and {"log_prob_mean", "advantage_mean"} <= set(spec.params)
    if spec.name in CHOOSE_AMONG_MICRO_BATCH and not whole:
        raise RecordError(
            f"loss {spec.name!r} chooses among the tokens of a micro-batch, and the record does not say how"
            " batches were divided; it replays with cov_fraction = 1 and both means given"
        )
    if wants_entropy_gradient(spec.name, spec.params) or spec.params.get("policy_entropy_fraction", 1) != 1:
        raise RecordError(
            f"loss {spec.name!r} with a term of the entropy: that of each token is not in the record"
        )


def recompute(spec: LossSpec, rows: Sequence[Columns]) -> Recomputed:
    """The loss over all rows, with its gradient by log-prob. Raises RecordError where the loss fails on what
    is recorded.

    A function of the user is taken to be what a loss must be: the same however rows are put together.
    """
    loss_fn = resolve_loss(spec.name)
    total, count = 0.0, 0.0
    slopes = np.zeros(len(rows))
    for index, row in enumerate(rows):
        inputs, log_probs = make_inputs(row)
        try:
            output = loss_fn(inputs, unit=spec.unit, **spec.params)
            output.sum.backward()
        except Exception as error:
            if isinstance(error, RolloutsError) or ":" in spec.name:
                raise RecordError(
                    f"loss {spec.name!r} fails on what is recorded: {type(error).__name__}: {error}"
                ) from error
            raise
        total += output.sum.item()
        count += float(output.count)
        assert log_probs.grad is not None
        slopes[index] = log_probs.grad.abs().sum().item()
    return Recomputed(total, count, slopes)


def make_inputs(row: Columns) -> tuple[LossInputs, Tensor]:
    """The inputs of a loss in float64, [1, T], and their log-probs, whose gradient is wanted."""

    def widen(name: str) -> Tensor:
        return torch.tensor(row[name][None], dtype=torch.float64)

    log_probs = widen("log_prob").requires_grad_()
    fields: Fields = {field: widen(name) for name, field in LOSS_FIELDS.items() if name in row}
    return LossInputs(log_probs=log_probs, mask=widen("mask") > 0, **fields), log_probs
