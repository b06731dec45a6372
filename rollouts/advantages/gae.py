"""Advantages from a critic's values, over ragged rows. Every row argument is one array [T_i]; what lies
outside a loss mask is never read.

Trained tokens follow one another as if what stands between them (a tool's answer, a template) were not there:
the value and the advantage of the next trained token are carried over it unchanged. A reward for what
happened in between belongs on the trained token before it.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollouts.advantages.group import per_trajectory, whiten_over_tokens
from rollouts.advantages.inputs import (
    AdvantageInputs,
    FloatRows,
    Floats,
    GAEResult,
    Masks,
    Rows,
    check_rows,
    require,
    scatter_trained,
    take_trained,
)
from rollouts.errors import ConfigError
from rollouts.types import FloatArray, Status


def compute_gae(
    rewards: Rows,
    values: Rows,
    loss_masks: Masks,
    *,
    gamma: float = 1.0,
    lam: float | ArrayLike = 1.0,
    critic_lam: float | None = None,
    bootstrap_values: ArrayLike = 0.0,
) -> GAEResult:
    """A_t = δ_t + gamma·lam·A_{t+1} with δ_t = r_t + gamma·V_{t+1} − V_t, and returns = A + V, over the
    trained tokens of each row.

    rewards and values [T_i] per row (values: the critic's before the token). After the last trained token V
    is 0, unless bootstrap_values [B] says what the critic expects beyond it: give that for truncated rows and
    0 for rows that ended. lam is one number or one per row [B] (see `compute_length_adaptive_lambda`). With
    critic_lam the returns use that lambda instead: VAPO takes 1. A row without trained tokens gives zeros.
    Computed in float64. Papers: 1506.02438; VAPO, 2504.05118. Raises ValueError on lengths that differ, on
    gamma or lam outside 0 to 1, and naming the row with a trained value that is not finite.
    """
    rows = len(loss_masks)
    try:
        lams, bootstrap = (
            np.broadcast_to(np.asarray(each, np.float64), rows) for each in (lam, bootstrap_values)
        )
    except ValueError as error:
        raise ValueError(
            f"lam and bootstrap_values: {error}; give one number, or one per row of {rows}"
        ) from error
    for name, numbers in {"gamma": gamma, "lam": lams, "critic_lam": critic_lam or 0.0}.items():
        for number in np.ravel(numbers):
            require(0 <= number <= 1, f"{name}={number}; it must be from 0 to 1")
    require(
        np.isfinite(bootstrap).all(), "bootstrap_values must be one finite number per row, 0 where it ended"
    )
    kept_rewards = _align_ends(take_trained("rewards", rewards, loss_masks))
    kept_values = _align_ends(take_trained("values", values, loss_masks))
    following = np.append(kept_values, bootstrap[:, None], axis=1)[:, 1:]
    deltas = kept_rewards + gamma * following - kept_values

    def sweep(lams: Floats) -> Floats:
        """[B, L] advantages, backwards over the tokens of all rows at once."""
        advantages, advantage = np.zeros_like(deltas), np.zeros(rows)
        for token in reversed(range(deltas.shape[1])):
            advantages[:, token] = advantage = deltas[:, token] + gamma * lams * advantage
        return advantages

    advantages = sweep(lams)
    returns = kept_values + (advantages if critic_lam is None else sweep(np.full(rows, critic_lam)))
    return GAEResult(
        *(
            tuple(
                scatter_trained(row[len(row) - np.count_nonzero(mask) :], mask)
                for row, mask in zip(each, loss_masks, strict=True)
            )
            for each in (advantages, returns)
        )
    )


@per_trajectory
def compute_gae_advantages(
    inputs: AdvantageInputs,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float | None = None,
    alpha: float | None = None,
    whiten: bool = True,
    bootstrap_truncated: bool = False,
) -> GAEResult:
    """`compute_gae` over the batch: what a run with a critic takes as its advantages, and the returns that
    its critic is trained on.

    alpha: lam is that of `compute_length_adaptive_lambda` for each row, and `lam` must be left out. whiten:
    `whiten_advantages` over the batch's tokens; returns stay as they are. bootstrap_truncated: what follows a
    row whose sample was truncated is worth the critic's value before the row's last trained token, the newest
    that there is, instead of 0; the row's reward counts beside it. "Row" means a trajectory: its segments are
    one after the other. Raises ConfigError without a critic's values, and for alpha
    beside lam; ValueError for bootstrap_truncated without samples; else what `compute_gae` raises.
    """
    if len(inputs.values) != len(inputs.rewards):
        raise ConfigError(
            "advantage 'gae' needs a critic's values, and there are none; add [rl.critic], or choose another"
            " advantage"
        )
    if alpha is not None and lam != 0.95:
        raise ConfigError(
            f"advantage 'gae' has lam={lam} and alpha={alpha}, which gives each row a lambda of its own;"
            " leave one of them out"
        )
    lams = lam
    if alpha is not None:
        lams = compute_length_adaptive_lambda(list(map(np.count_nonzero, inputs.loss_masks)), alpha=alpha)
    bootstrap = np.zeros(len(inputs.values))
    if bootstrap_truncated:
        require(inputs.samples, "bootstrap_truncated needs samples, whose status says which rows were cut")
        for row, (sample, mask) in enumerate(zip(inputs.samples, inputs.loss_masks, strict=True)):
            if sample.status is Status.TRUNCATED and mask.any():
                bootstrap[row] = inputs.values[row][mask][-1]
    result = compute_gae(
        inputs.token_rewards,
        inputs.values,
        inputs.loss_masks,
        gamma=gamma,
        lam=lams,
        critic_lam=critic_lam,
        bootstrap_values=bootstrap,
    )
    if whiten:
        result = result._replace(advantages=whiten_advantages(result.advantages, inputs.loss_masks))
    return result


def compute_length_adaptive_lambda(lengths: ArrayLike, *, alpha: float = 0.05) -> Floats:
    """[B] 1 − 1/(alpha·length), at least 0: long rows get a lambda nearer to 1. Paper: VAPO, 2504.05118.
    Raises ValueError unless alpha > 0.

    At alpha = 0.05 a row of 20 tokens or fewer gets 0 and one of 100 gets 0.8.
    """
    require(alpha > 0, f"alpha={alpha}; it must be above 0, 0.05 is usual")
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(np.asarray(lengths, np.float64), 1.0)))


def compute_discounted_returns(rewards: Rows, loss_masks: Masks, *, gamma: float = 1.0) -> FloatRows:
    """Reward to go of each trained token, Σ_{s ≥ t} gamma^(s−t)·r_s counted in trained tokens; 0 elsewhere:
    GAE without a critic. Each row is an episode: join the segments of a trajectory first.

    Raises what `compute_gae` raises.
    """
    return compute_gae(rewards, [np.zeros(len(mask)) for mask in loss_masks], loss_masks, gamma=gamma).returns


@per_trajectory
def compute_reinforce_pp_token_advantages(inputs: AdvantageInputs, *, ddof: int = 1) -> FloatRows:
    """Reward to go of each trained token, r − β·Σ_{s ≥ t} (lp_s − ref_s), whitened over all trained tokens of
    the batch. Paper: REINFORCE++, 2501.03262.

    It runs through all segments of a trajectory. Raises ValueError without token_rewards.
    """
    need_token_rewards(inputs, "reinforce_pp_token")
    returns = compute_discounted_returns(inputs.token_rewards, inputs.loss_masks)
    return whiten_advantages(returns, inputs.loss_masks, ddof=ddof)


@per_trajectory
def compute_turn_returns_advantages(
    inputs: AdvantageInputs, *, gamma: float = 1.0, whiten: bool = False
) -> FloatRows:
    """R_k − b on every token of turn k, R_k = Σ_{j ≥ k} gamma^(j−k)·r_j: a turn answers for its own reward
    and those after it.

    A turn is a run of trained tokens, counted through all segments of a trajectory; r_j is the sum of its
    token rewards: its own reward, its KL terms, and of the last turn what the turns leave of the trajectory's
    reward. b is the mean of R_0 over the other trajectories of the group, 0 where there are none. It is
    unbiased, as it depends on the prompt and on them alone. The mean of R_k over the trajectories that have a
    turn k is not: whether there is one is the policy's doing. The trajectory's own R_0 in the mean would
    shrink the gradient if gamma is 1, and bend it if not.

    A trajectory in which nothing trains has its reward as R_0. whiten: `whiten_advantages` over the batch.
    Raises ValueError without token_rewards, and on gamma outside 0 to 1.
    """
    need_token_rewards(inputs, "turn_returns")
    trained = take_trained("token_rewards", inputs.token_rewards, inputs.loss_masks)
    turns = [np.cumsum(np.diff(mask, prepend=False) & mask)[mask] - 1 for mask in inputs.loss_masks]
    rewards = [np.bincount(*each) for each in zip(turns, trained, strict=True)]
    returns = compute_discounted_returns(
        rewards, [np.ones_like(row, np.bool_) for row in rewards], gamma=gamma
    )
    pairs = zip(returns, inputs.rewards, strict=True)
    totals = np.asarray([row[0] if len(row) else reward for row, reward in pairs], np.float64)
    _, groups = np.unique(inputs.group_indices, return_inverse=True)
    others = np.bincount(groups)[groups] - 1
    baselines = (np.bincount(groups, totals)[groups] - totals) / others.clip(1)
    advantages = tuple(
        scatter_trained(row[own] - baseline, mask)
        for row, own, baseline, mask in zip(returns, turns, baselines, inputs.loss_masks, strict=True)
    )
    return whiten_advantages(advantages, inputs.loss_masks) if whiten else advantages


def need_token_rewards(inputs: AdvantageInputs, kind: str) -> None:
    """Raises ValueError without token_rewards."""
    require(
        len(inputs.token_rewards) == len(inputs.rewards),
        f"advantage {kind!r} needs token_rewards and loss_masks, which the RL loop gives it",
    )


def whiten_advantages(advantages: Rows, loss_masks: Masks, *, ddof: int = 1) -> FloatRows:
    """Per row [T_i]: (A − mean) / sqrt(variance + 1e-8) over all trained tokens of the batch, 0 elsewhere;
    what PPO does with GAE's advantages.

    ddof 1: the variance has the number of tokens − 1 in its denominator. Advantages without spread give 0.
    Whiten the advantages only, not the returns. Raises ValueError on lengths that differ, and naming the row
    with a trained value that is not finite.
    """
    kept = take_trained("advantages", advantages, loss_masks)
    values = np.concatenate([np.zeros(0), *kept])
    whitened = whiten_over_tokens(values, np.ones(len(values), np.int64), ddof=ddof)
    parts = np.split(whitened, np.cumsum([len(row) for row in kept])[:-1])
    return tuple(map(scatter_trained, parts, loss_masks))


def compute_explained_variance(values: Rows, returns: Rows, loss_masks: Masks) -> float | None:
    """1 − Var(returns − values) / Var(returns) over all trained tokens: 1 is a perfect critic, 0 one no
    better than a constant.

    None where the returns do not vary, or fewer than two tokens train. Raises ValueError on lengths that
    differ.
    """
    target, predicted = (
        np.concatenate([np.zeros(0), *take_trained(name, rows, loss_masks)])
        for name, rows in (("returns", returns), ("values", values))
    )
    if len(target) < 2 or np.ptp(target) == 0:
        return None
    return float(1.0 - (target - predicted).var() / target.var())


def _align_ends(rows: list[Floats]) -> Floats:
    """[B, L] the rows, with zeros before them: all end in the last column."""
    aligned = np.zeros((len(rows), max(map(len, rows), default=0)))
    for row, values in zip(aligned, rows, strict=True):
        row[len(row) - len(values) :] = values
    return aligned


# --- the KL term in the reward ------------------------------------------------------------------------------


def subtract_kl(
    rewards: ArrayLike,
    log_probs: Rows,
    ref_log_probs: Rows,
    loss_masks: Masks,
    beta: float,
    *,
    trajectories: ArrayLike | None = None,
) -> tuple[FloatArray, FloatArray]:
    """(rewards − beta·kl [B], kl [B]) with kl = Σ over the trained tokens of the row's trajectory of log_prob
    − ref_log_prob: k1, nats.

    Rows of equal `trajectories` [B] are segments of one, and each gets the KL of all; None: every row is one
    by itself.

    InstructGPT (2203.02155) puts −beta·(lp_t − ref_t) into the reward of token t. Here a sample has one
    advantage for all its tokens, so the sum goes into its one reward, before the group statistics: the same
    objective, reward − beta·KL(policy || reference) of the sequence, with the group as its baseline. Under
    "grpo" the group's std then includes the KL term. Positions outside the masks are never read. Raises
    ValueError on lengths that differ and naming the row with a number that is not finite.
    """
    values, kls, places = _token_kl(rewards, log_probs, ref_log_probs, loss_masks, trajectories)
    kl = np.bincount(places, [row.sum() for row in kls])[places]
    return (values - beta * kl).astype(np.float32), kl.astype(np.float32)


def compute_token_rewards(
    rewards: ArrayLike,
    log_probs: Rows,
    ref_log_probs: Rows,
    loss_masks: Masks,
    beta: float,
    *,
    trajectories: ArrayLike | None = None,
    turn_rewards: Rows | None = None,
) -> FloatRows:
    """Per row [T_i]: −beta·(log_prob − ref_log_prob) on every trained token, with its turn's reward, if any,
    and on the last one with what those leave of the row's reward. 0 elsewhere.

    Of rows with equal `trajectories` [B], which share a reward, the last one that trains gets that.

    What `compute_gae` and `compute_discounted_returns` take: a token then answers for the KL of the tokens
    after it and not for those before. Used with the policy gradient, the coefficient of a token's ∇log π
    holds −beta·log(π/ref) of itself and its future. A row without trained tokens has nowhere to put its
    reward and gets zeros; so has a turn whose last token does not train, and its reward stays with what is
    left. Paper: InstructGPT, 2203.02155. Raises as `subtract_kl`.
    """
    values, kls, places = _token_kl(rewards, log_probs, ref_log_probs, loss_masks, trajectories)
    rows = [-beta * kl for kl in kls]
    left = values[np.unique(places, return_index=True)[1]]
    if turn_rewards is not None:
        turns = take_trained("turn_rewards", turn_rewards, loss_masks)
        rows = [row + own for row, own in zip(rows, turns, strict=True)]
        left -= np.bincount(places, [own.sum() for own in turns])
    ends = {place: row for place, row in zip(places, rows, strict=True) if len(row)}
    for place, row in ends.items():
        row[-1] += left[place]
    return tuple(map(scatter_trained, rows, loss_masks))


def _token_kl(
    rewards: ArrayLike,
    log_probs: Rows,
    ref_log_probs: Rows,
    loss_masks: Masks,
    trajectories: ArrayLike | None,
) -> tuple[Floats, list[Floats], NDArray[np.intp]]:
    """(the rewards [B], log_prob − ref_log_prob of the trained tokens of each row, [B] which trajectory each
    row belongs to, numbered from 0: with None every row is one).
    """
    values, count = np.asarray(rewards, np.float64), len(log_probs)
    check_rows(values, "rewards", count)
    policy = take_trained("log_probs", log_probs, loss_masks)
    reference = take_trained("ref_log_probs", ref_log_probs, loss_masks)
    numbers = np.arange(count) if trajectories is None else np.asarray(trajectories, np.int64)
    check_rows(numbers, "trajectories", count)
    _, places = np.unique(numbers, return_inverse=True)
    return values, [ours - theirs for ours, theirs in zip(policy, reference, strict=True)], places
