"""What the RL loop does to a batch between generation and training: log-probs, advantages, the loss by name,
minibatches.

What a step of RL asks functions of the user about each group of its batch: pairs, a teacher's prompts.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from rollouts.advantages import (
    ADVANTAGES,
    AdvantageFn,
    AdvantageInputs,
    GAEResult,
    broadcast_advantages,
    compute_advantages,
    compute_token_rewards,
    subtract_kl,
)
from rollouts.advantages.distillation import align_rows, compute_distillation_advantages
from rollouts.config.schema import CLIPPED_BY_SETTINGS, DistillationConfig, RLTrainingConfig
from rollouts.errors import ConfigError, ModelError, StalenessError, UserFunctionError
from rollouts.loops.updates import Update
from rollouts.protocols import LogProbScorer, TrainingBackend
from rollouts.rewards.check import RAISED, TURNS, describe
from rollouts.types import (
    TRAJECTORY,
    FloatArray,
    FloatRows,
    Function,
    IntArray,
    LossSpec,
    Numbers,
    OptimParams,
    RolloutBatch,
    Sample,
    SampleGroup,
    Status,
    number_trajectories,
)

Score = Callable[[RolloutBatch], Awaitable[FloatRows]]
"""LogProbScorer.score, or a backend's forward."""


# --- what functions of the user say of groups ---------------------------------------------------------------


def ask_groups(samples: Sequence[Sample], ask: Callable[[SampleGroup], Any], setting: str) -> list[Any]:
    """What `ask` makes of each group. Raises UserFunctionError, with the setting and the group, for what it
    raises, and for a trajectory of several segments, which is no single answer to a prompt.
    """
    answers = []
    for index, members in groupby(samples, lambda sample: sample.group_index):
        group = SampleGroup(index or 0, "", tuple(members))
        try:
            if len(group.ends) < len(group.samples):
                raise ValueError("a trajectory has several segments")
            answers.append(ask(group))
        except RAISED as error:
            raise UserFunctionError(f"{setting} failed on group {index}: {describe(error)}") from error
    return answers


async def score_told(
    batch: RolloutBatch,
    *,
    score: Score,
    context: Function,
    tokenize: Callable[[Sample], IntArray],
    limit: int,
) -> FloatRows:
    """`score` of each response after the prompt that `context` gives for its sample, in place of what stands
    before the first trained token. Where it gives None the row has the policy's own log-probs.

    Raises UserFunctionError where that is not a prompt, text or messages, or None for each sample of a group,
    or is longer, with the response, than `limit` tokens; and as ask_groups.
    """
    told = {}

    def tell(group: SampleGroup) -> None:
        for sample, prompt in zip(group.samples, context(group.samples), strict=True):
            if prompt is not None:
                ids, begin = tokenize(replace(sample, prompt=prompt)), int(sample.loss_mask.argmax())
                tokens = np.append(ids, sample.tokens[begin:])
                if len(tokens) > limit:
                    raise ValueError(f"prompt and response have {len(tokens)} tokens, the context {limit}")
                told[sample.id] = tokens, np.append(np.zeros(len(ids), np.bool_), sample.loss_mask[begin:])

    ask_groups(batch.samples, tell, "rl.distillation.context, which gives a prompt or None for each sample,")
    found = list(batch.old_log_probs or batch.rollout_log_probs or ())
    if told:
        tokens, masks = zip(*told.values(), strict=True)
        rows = [row for row, sample in enumerate(batch.samples) if sample.id in told]
        scored = await score(RolloutBatch(tokens=tokens, loss_masks=masks, temperature=batch.temperature))
        aligned = align_rows(scored, masks, [batch.loss_masks[row] for row in rows])
        for row, values in zip(rows, aligned, strict=True):
            found[row] = values
    return tuple(found)


# --- the batch ----------------------------------------------------------------------------------------------


MINIBATCH_STREAM = 0x6D696E69  # keeps the draws apart from others with the same seed


def compute_lags(batch: RolloutBatch, policy_version: int) -> FloatArray:
    """[B] policy_version − the oldest weight version of any trained token of the row."""
    assert batch.weight_versions is not None
    rows = zip(batch.weight_versions, batch.loss_masks, strict=True)
    return np.asarray(
        [policy_version - versions[mask].min() if mask.any() else 0 for versions, mask in rows], np.float32
    )


def check_staleness(lags: FloatArray, *, max_staleness: int) -> None:
    """Raises StalenessError if a row is older than allowed, or newer than the trainer. The manager promises
    neither happens.
    """
    for row in np.flatnonzero((lags < 0) | (lags > max_staleness)):
        raise StalenessError(
            f"row {row} has lag {int(lags[row])}; rl.max_staleness={max_staleness} allows 0 to"
            f" {max_staleness} steps"
        )


async def add_log_probs(
    batch: RolloutBatch,
    backend: TrainingBackend,
    reference: LogProbScorer | None,
    critic: TrainingBackend | None,
    config: RLTrainingConfig,
    teacher: Score | None = None,
) -> RolloutBatch:
    """The batch with the reference's log-probs if a KL term or controller needs them (for an exact KL the
    backend asks the reference itself), the trainer's own if config.recompute_old, the teacher's if
    config.distillation, and the critic's values if there is one.
    """
    if config.kl_estimator != "exact" and (config.kl_coef > 0 or config.kl_control != "fixed"):
        if reference is None:
            raise ConfigError(
                f"rl.kl_coef={config.kl_coef} needs a reference model; pass reference=, or set rl.kl_coef=0"
            )
        batch = replace(batch, ref_log_probs=await reference.score(batch))
    if config.recompute_old:
        batch = replace(batch, old_log_probs=await backend.forward(batch))
    if config.distillation:
        if teacher is None:
            raise ConfigError("rl.distillation needs its teacher; pass teacher=, or leave the table out")
        batch = replace(batch, teacher_log_probs=await teacher(batch))
    if critic is not None:
        batch = replace(batch, old_values=await critic.forward(batch))
    return batch


def add_advantages(
    batch: RolloutBatch, config: RLTrainingConfig, functions: Mapping[str, AdvantageFn] = ADVANTAGES
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch with an advantage on every trained token, and metrics: of the KL too, where there are
    log-probs of the reference.

    With kl_in="reward" each row's reward becomes reward − β·Σ_t (lp_t − ref_t) before the group statistics,
    over the tokens of the row's trajectory, lp being the policy's log-probs when the batch was sampled. A
    trajectory of several segments counts once in them. Named rewards are those that every sample of the batch
    has. With a critic's values in the batch, the function sees them and the rewards by token, the KL term on
    each, and answers with returns too, which the batch then has. What compute_taught makes of a teacher's
    log-probs is added; without rewards it is all there is. Raises UserFunctionError when the advantage
    function raises or answers with no advantages, or with no returns for a critic.
    """
    if config.pairs:  # whose loss has slopes of its own
        return batch, {}
    trajectories = find_trajectories(batch)
    metrics, returns = measure_kl(batch, trajectories), None
    try:
        advantages = np.zeros(len(batch), np.float32)
        if batch.rewards is not None:
            advantages = compute_advantages(
                make_advantage_inputs(batch, config), functions[config.advantage], **config.advantage_params
            )
        if isinstance(advantages, GAEResult):
            advantages, returns = advantages
        elif batch.old_values is not None:
            raise ValueError("it gives no returns, which the critic is trained on: answer with a GAEResult")
        tokens = broadcast_advantages(advantages, batch.loss_masks)
    except ConfigError:
        raise
    except RAISED as error:
        raise UserFunctionError(f"rl.advantage={config.advantage!r} failed: {describe(error)}") from error
    if config.distillation is not None:
        taught, measured = compute_taught(batch, config.distillation)
        advantages = tokens = tuple(own + more for own, more in zip(tokens, taught, strict=True))
        metrics |= measured
    means = advantages
    if isinstance(advantages, tuple):  # one array per row
        trained = [row[mask] for row, mask in zip(tokens, batch.loss_masks, strict=True)]
        means = np.asarray([row.mean() if len(row) else 0.0 for row in trained], np.float32)
        advantages = np.concatenate(trained)
    else:
        advantages = advantages[np.unique(trajectories, return_index=True)[1]]
    advantages = np.asarray(advantages, np.float64)  # the sum of float32's largest numbers is finite too
    metrics |= {
        "advantage/abs_mean": float(np.abs(advantages).mean()),
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std()),
    }
    means = np.where(batch.response_lengths, means, np.float32(0.0))
    return replace(batch, advantages=tokens, mean_advantages=means, returns=returns), metrics


def leave_out_cut(batch: RolloutBatch, *, truncated: bool) -> RolloutBatch:
    """The batch in which no token of a trajectory trains that a limit ended for which the config says so, and
    with `truncated` of none whose last segment was truncated. Its rows stay; they are in no denominator of
    tokens or sequences.
    """
    numbers = find_trajectories(batch).tolist()
    trains = {}  # by trajectory, as its last segment says
    for number, end in zip(numbers, batch.samples, strict=True):
        record = end.metadata.get(TRAJECTORY, {})
        trains[number] = record.get("trains", True) and not (truncated and end.status is Status.TRUNCATED)
    kept = np.asarray([trains[number] for number in numbers])
    if kept.all():
        return batch
    masks = tuple(mask & keep for mask, keep in zip(batch.loss_masks, kept, strict=True))
    assert batch.mean_advantages is not None
    means = np.where(kept, batch.mean_advantages, np.float32(0.0))
    return replace(batch, loss_masks=masks, mean_advantages=means)


def compute_taught(batch: RolloutBatch, config: DistillationConfig) -> tuple[FloatRows, dict[str, float]]:
    """(compute_distillation_advantages of the batch, metrics); of the policy the log-probs that were
    recomputed, or else those that it sampled with.

    kl/teacher: policy − teacher, mean over the trained tokens of the rows in which the two differ, before the
    coefficient and the clip: the k1 estimate of KL(policy || teacher), nats per token; absent where it is not
    finite. Raises ModelError for a log-prob of the teacher that is not finite, unless a clip bounds it.
    """
    log_probs, teacher = batch.old_log_probs or batch.rollout_log_probs, batch.teacher_log_probs
    assert log_probs is not None and teacher is not None
    try:
        advantages = compute_distillation_advantages(
            teacher, log_probs, batch.loss_masks, coef=config.coef, clip=config.clip or None
        )
    except ValueError as error:
        raise ModelError(
            f"rl.distillation.teacher={config.teacher!r}: {error}; a teacher that rules a token out needs"
            " rl.distillation.clip"
        ) from error
    rows = zip(log_probs, teacher, batch.loss_masks, strict=True)
    gaps = [gap for own, other, mask in rows if (gap := (own - other)[mask]).any()]
    kl = float(np.concatenate(gaps).mean(dtype=np.float64)) if gaps else 0.0
    return advantages, {"kl/teacher": kl} if np.isfinite(kl) else {}


def make_advantage_inputs(batch: RolloutBatch, config: RLTrainingConfig) -> AdvantageInputs:
    """What an advantage function sees of the batch. Token rewards are [T_i] per row, those of
    compute_token_rewards: with a KL term if kl_in="reward".
    """
    rewards, log_probs = batch.rewards, batch.old_log_probs or batch.rollout_log_probs
    assert rewards is not None and batch.group_indices is not None and log_probs is not None
    reference, masks, trajectories = batch.ref_log_probs, batch.loss_masks, find_trajectories(batch)
    beta = config.kl_coef if config.kl_in == "reward" else 0.0
    if beta == 0:
        log_probs = reference = [np.zeros(len(mask)) for mask in masks]
    assert reference is not None
    token_rewards = compute_token_rewards(
        rewards, log_probs, reference, masks, beta, trajectories=trajectories, turn_rewards=batch.turn_rewards
    )
    rewards, _ = subtract_kl(rewards, log_probs, reference, masks, beta, trajectories=trajectories)
    parts = batch.samples[0].rewards if batch.samples else ()
    weights = {name: part.weight for name, part in config.rollout.rewards.items()}
    if weights and TURNS in parts:
        weights[TURNS] = 1.0
    return AdvantageInputs(
        rewards=rewards.astype(np.float64),
        group_indices=batch.group_indices,
        lengths=batch.response_lengths.copy(),  # the batch keeps its own, whatever a function does with this
        named_rewards={
            name: np.asarray([sample.rewards[name] for sample in batch.samples])
            for name in parts
            if all(name in sample.rewards for sample in batch.samples)
        },
        reward_weights=config.rollout.reward_weights or weights,
        samples=batch.samples,
        trajectories=trajectories,
        values=batch.old_values or (),
        token_rewards=token_rewards,
        loss_masks=masks,
    )


def find_trajectories(batch: RolloutBatch) -> IntArray:
    """[B] rows that are segments of one trajectory have one number; without samples every row is a
    trajectory.
    """
    return number_trajectories(batch.samples) if batch.samples else np.arange(len(batch))


def measure_kl(batch: RolloutBatch, trajectories: IntArray) -> dict[str, float]:
    """kl/ref_per_sample: Σ over the trained tokens of a trajectory of lp − ref (k1, nats), mean over
    trajectories, of KL(policy || reference).

    lp is the policy's when the batch was sampled, or recomputed. Nothing without the reference's log-probs,
    and where a row's is not finite.
    """
    log_probs = batch.old_log_probs or batch.rollout_log_probs
    if batch.ref_log_probs is None or log_probs is None or not len(batch):
        return {}
    try:
        _, kl = subtract_kl(np.zeros(len(batch)), log_probs, batch.ref_log_probs, batch.loss_masks, 0.0)
    except ValueError:  # a row's is not finite
        return {}
    return {"kl/ref_per_sample": float(kl.sum(dtype=np.float64)) / len(np.unique(trajectories))}


def sum_ref_kl(metrics: Numbers, batch: RolloutBatch) -> float:
    """Nats per sample of kl/exact, a mean over trained tokens, or else kl/ref; NaN without either."""
    mean = metrics.get("kl/exact", metrics.get("kl/ref", math.nan))
    return mean * float(batch.response_lengths.sum()) / len(np.unique(find_trajectories(batch)))


def make_loss_spec(config: RLTrainingConfig) -> LossSpec:
    """The loss that `config` names, with its numbers. `loss_params` come last and win."""
    params = {}
    if config.loss in CLIPPED_BY_SETTINGS:
        params = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.kl_coef > 0 and config.kl_in == "loss":
        params |= {"kl_coef": config.kl_coef, "kl_estimator": config.kl_estimator}
    rollout, constant = config.rollout, None
    if config.normalise_by == "constant":
        groups = rollout.num_prompts + rollout.replay
        budget = rollout.max_trajectory_tokens if rollout.has_turns else rollout.max_new_tokens
        constant = float(groups * rollout.samples_per_prompt * budget)
    return LossSpec(config.loss, params | config.loss_params, config.normalise_by, constant)


# --- updates ------------------------------------------------------------------------------------------------


def plan_updates(
    batch: RolloutBatch, loss: LossSpec, config: RLTrainingConfig, *, seed: int, step: int
) -> list[Update]:
    """What each optimizer step on the batch is made of, in order: updates_per_batch passes of `minibatches`
    parts; one part is the batch itself.

    Each pass divides the groups anew, in an order that is a pure function of (seed, step, pass); the parts
    differ by one group at most. Rows keep their order inside a part, and advantages are those of the whole
    batch. A part has a denominator of its own: of unit "constant", its share of the batch's by groups. The
    backend is asked for per-token arrays, which the record keeps. The batch is first that
    of leave_out_cut.
    """
    if batch.samples:
        batch = leave_out_cut(batch, truncated=config.mask_truncated)
    loss = replace(loss, per_token=True)
    if config.minibatches == 1:
        return [(batch, loss)] * config.updates_per_batch
    assert batch.group_indices is not None
    groups = np.unique(batch.group_indices)
    updates = []
    for epoch in range(config.updates_per_batch):
        order = np.random.default_rng([MINIBATCH_STREAM, seed, step, epoch]).permutation(groups)
        for part in np.array_split(order, min(config.minibatches, len(groups))):
            share = None if loss.constant is None else loss.constant * (len(part) / len(groups))
            rows = np.flatnonzero(np.isin(batch.group_indices, part))
            updates.append((select_rows(batch, rows), replace(loss, constant=share)))
    return updates


def choose_optim(
    config: RLTrainingConfig, batch: RolloutBatch, lr_factor: float, undone: float = 0.0
) -> OptimParams | None:
    """The learning rate of the batch's updates: rl.optim.lr · lr_factor, with rl.lr_by_error also times the
    error, within lr_by_error and 1. None: the schedule's. Without momentum after an update that was undone:
    it would lead there again, for it was put back too.

    error: the best reward of a group less its mean, mean over the groups: with votes the share that did not
    give the label.
    """
    rewards, numbers = batch.rewards, batch.group_indices
    if config.lr_by_error and rewards is not None and numbers is not None:
        groups = [rewards[numbers == number] for number in np.unique(numbers)]
        error = float(np.mean([group.max() - group.mean() for group in groups]))
        lr_factor *= min(1.0, max(config.lr_by_error, error))
    if lr_factor == 1.0 and not undone:
        return None
    optim = config.optim
    betas = (0.0, optim.beta2) if undone else None
    return OptimParams(lr=optim.lr * lr_factor, max_grad_norm=optim.max_grad_norm, betas=betas)


def select_rows(batch: RolloutBatch, rows: IntArray) -> RolloutBatch:
    """The batch of those rows, in that order."""
    chosen = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            chosen[field.name] = value[rows]
        elif isinstance(value, tuple) and value:
            chosen[field.name] = tuple(value[row] for row in rows)
    return replace(batch, **chosen)
