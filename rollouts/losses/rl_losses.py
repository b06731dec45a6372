"""Policy-gradient losses. Per token: lp = log π(a|s) with gradient, old, mu and ref without; A = advantage;
minimised.

    ratio against old = the trainer's recomputed log-probs if the batch has them, else mu = the engine's. With
    both, a token's loss is also multiplied by min(exp(old − mu), importance_cap), or by what `correction`
    says. See rollouts.losses.corrections.

What all losses can add (KL, entropy bonus, correction, ...) and all metrics are there too. A sampled token
that the policy cannot give, lp = −inf, has a finite ratio (e^−20) and no gradient from it; losses in lp
itself are infinite there, and the step is skipped.
"""

import torch
from torch import Tensor

from rollouts.losses.corrections import POLICY_LOSSES, PolicyTerm, policy_loss
from rollouts.losses.inputs import (
    LossInputs,
    compute_log_ratio,
    compute_row_sum,
    compute_sequence_ratio,
    compute_token_ratio,
    select_top_fraction,
)

__all__ = ["POLICY_LOSSES", "compute_covariances"]

HIGHEST_LOG_PROB = -1e-6  # of what else a token could have been: the log of 1 − 1 is infinite

# --- one ratio per token ------------------------------------------------------------------------------------


@policy_loss()
def ppo_clip_loss(
    inputs: LossInputs,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyTerm:
    """−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), r = exp(lp − old); gradient 0 on clipped tokens.

    dual_clip = c > 1 also bounds the loss of a token with A < 0 by c·|A|. With old and mu this is decoupled
    PPO (2110.00641; 2505.24298). Papers: 1707.06347; 2503.14476 (clip_high above clip_low); 1912.09729 (dual
    clip). Raises ConfigError naming what is wrong.
    """
    term = _clip(_token_ratio(inputs), advantages, clip_low, clip_high)
    if dual_clip is None:
        return term
    bound = -dual_clip * advantages
    over = (bound > 0) & (term.token_losses.detach() > bound)
    return term._replace(
        token_losses=torch.where(over, bound, term.token_losses), shares={"clip_ratio/dual": over}
    )


@policy_loss("mu")
def importance_sampling_loss(inputs: LossInputs, advantages: Tensor) -> PolicyTerm:
    """−A·exp(lp − mu): the unclipped off-policy gradient, against mu even when old is there."""
    ratio = compute_token_ratio(inputs.log_probs, inputs.mu)
    return PolicyTerm(-advantages * ratio, ratio)


@policy_loss("none")
def reinforce_loss(inputs: LossInputs, advantages: Tensor) -> PolicyTerm:
    """−A·lp: the on-policy policy gradient. Only a `correction` accounts for another sampler."""
    return PolicyTerm(-advantages * inputs.log_probs)


@policy_loss()
def cispo_loss(
    inputs: LossInputs, advantages: Tensor, *, ratio_low: float = 0.0, ratio_high: float = 5.0
) -> PolicyTerm:
    """−clip(r, ratio_low, ratio_high)·A·lp with the clipped ratio detached: no token loses its gradient. The
    bounds are absolute.

    `clip_ratio` and its parts count the tokens whose weight was clipped, which keep a gradient, of either
    sign of A. Papers: 2506.13585; 2510.13786.
    """
    ratio = _token_ratio(inputs).detach()
    losses = -ratio.clamp(ratio_low, ratio_high) * advantages * inputs.log_probs
    return PolicyTerm(losses, ratio, (ratio < ratio_low, ratio > ratio_high))


@policy_loss()
def sapo_loss(
    inputs: LossInputs, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> PolicyTerm:
    """−(4/τ)·σ(τ·(r − 1))·A, τ = tau_positive where A > 0, else tau_negative: a soft gate instead of a clip.

    Its gradient is that of PPO at r = 1 and fades on both sides, faster with a larger τ. SAPO, 2511.20347.
    """
    ratio = _token_ratio(inputs)
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return PolicyTerm(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages, ratio)


@policy_loss("mu")
def dppo_loss(
    inputs: LossInputs, advantages: Tensor, *, tv_low: float = 0.2, tv_high: float = 0.2
) -> PolicyTerm:
    """−A·exp(lp − mu), 0 where the update would go on beyond the trust region: A > 0 and e^lp − e^mu >
    tv_high, or A < 0 and e^mu − e^lp > tv_low.

    The region is one of the token's probability, the total variation of "this token or another", not of the
    ratio: rare tokens may move by large ratios. Paper: DPPO, 2602.04879. With mu_penalty_coef = 1e-3 this is
    the default loss of prime-rl (2602.02276).
    """
    distance = inputs.log_probs.detach().exp() - inputs.mu.exp()
    return _stop_beyond(inputs, advantages, distance, tv_low, tv_high)


@policy_loss("mu")
def dppo_kl_loss(
    inputs: LossInputs, advantages: Tensor, *, kl_low: float = 0.05, kl_high: float = 0.05
) -> PolicyTerm:
    """dppo with the KL of "this token or another", engine || policy, as the distance: kl_high where A > 0 and
    lp > mu, kl_low where A < 0 and lp < mu.

    KL = p·(mu − lp) + (1 − p)·log((1 − p)/(1 − q)), p = e^mu, q = e^lp, in nats; a probability above 1 − 1e-6
    counts as that. Paper: DPPO, 2602.04879 (binary KL).
    """
    mu, policy = inputs.mu, inputs.log_probs.detach()
    log_rest, log_policy_rest = (
        torch.log(-torch.expm1(values.clamp(max=HIGHEST_LOG_PROB))) for values in (mu, policy)
    )
    gap, p = compute_log_ratio(mu, policy), mu.exp()
    distance = (p * gap + (1 - p) * (log_rest - log_policy_rest)) * -gap.sign()
    return _stop_beyond(inputs, advantages, distance, kl_low, kl_high)


@policy_loss("none")
def dro_loss(inputs: LossInputs, advantages: Tensor, *, beta: float = 0.05) -> PolicyTerm:
    """−A·lp + ½·beta·(lp − mu)²: direct reward optimisation, token by token as in Tinker.

    The papers (2405.19107; 2501.12599) square the sequence's log-ratio, not the token's.
    """
    return PolicyTerm(-advantages * inputs.log_probs + 0.5 * beta * (inputs.log_probs - inputs.mu).square())


# --- one ratio per sequence ---------------------------------------------------------------------------------


@policy_loss(unit="sequences")
def gspo_loss(
    inputs: LossInputs, advantages: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> PolicyTerm:
    """−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A) on every token, s = exp(mean over the row of lp −
    old): one ratio per sequence.

    With unit "sequences" this is the paper's objective; with "tokens" long rows weigh more. Paper:
    2507.18071. The ratio metrics are of s.
    """
    ratio = compute_sequence_ratio(inputs.log_probs - inputs.need_old(), inputs.mask)
    return _clip(ratio.expand_as(inputs.mask), advantages, clip_low, clip_high)


@policy_loss(unit="sequences")
def gspo_token_loss(
    inputs: LossInputs, advantages: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> PolicyTerm:
    """gspo's value with a gradient per token: −min(s_t·A_t, clip(s_t, ...)·A_t), s_t = sg[s]·exp(lp −
    sg[lp]).

    For advantages that differ inside a row; where they do not, value and gradient are gspo's with unit
    "sequences". Paper: 2507.18071, eq. 14.
    """
    detached = inputs.log_probs.detach()
    sequence = compute_sequence_ratio(detached - inputs.need_old(), inputs.mask)
    # −inf − −inf would be NaN; a NaN is in `sequence` already
    own = torch.exp(torch.where(detached > -torch.inf, inputs.log_probs - detached, 0.0))
    return _clip(sequence * own, advantages, clip_low, clip_high)


@policy_loss(unit="sequences")
def gmpo_loss(
    inputs: LossInputs, advantages: Tensor, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> PolicyTerm:
    """−A·exp(mean over the row of the clipped lp − old): the geometric mean of clipped token ratios.

    lp − old is held below clip_high where A > 0 and above −clip_low where A < 0, in nats; a clipped token has
    exactly no gradient, the others of its row keep theirs. The ratio metrics are of the geometric mean.
    Paper: GMPO, 2507.20673, which clips at ±0.4.
    """
    log_ratio = inputs.log_probs - inputs.need_old()
    low, high = clipped = _find_clipped(log_ratio, advantages, -clip_low, clip_high)
    bounded = torch.where(low, -clip_low, torch.where(high, clip_high, log_ratio))
    ratio = compute_sequence_ratio(bounded, inputs.mask).expand_as(advantages)
    return PolicyTerm(-advantages * ratio, ratio, clipped)


@policy_loss("mu")
def vespo_loss(
    inputs: LossInputs,
    advantages: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> PolicyTerm:
    """−sg[φ(W)]·A·lp with φ(W) = W^k·exp(λ·(1 − W)), W = exp(sum over the row of lp − mu); k and λ by the
    sign of A, those of A = 0 being the positive ones.

    A smooth weight of the whole sequence, not of its mean: 1 at W = 1, largest at W = k/λ, and 0 for
    sequences that have become unlikely or far likelier. The ratio metrics are of W. Paper: VESPO, 2602.10693;
    defaults of TRL.
    """
    log_ratio = compute_row_sum(inputs.log_probs.detach() - inputs.mu, inputs.mask)
    ratio, positive = torch.exp(log_ratio), advantages >= 0
    k = torch.where(positive, k_positive, k_negative)
    decay = torch.where(positive, lambda_positive, lambda_negative)
    weights = torch.exp(k * log_ratio + decay * (1 - ratio))
    return PolicyTerm(-weights * advantages * inputs.log_probs, ratio.expand_as(weights))


# --- tokens that would cost most entropy --------------------------------------------------------------------


def compute_covariances(
    inputs: LossInputs, log_prob_mean: float | None = None, advantage_mean: float | None = None
) -> Tensor:
    """[B, T] (lp − mean lp)·(A − mean A), detached, 0 outside the mask: to first order, how much entropy an
    update on the token costs.

    A mean that is not given is that of the masked tokens here. Paper: 2505.22617.
    """
    means = (inputs.log_probs.detach(), log_prob_mean), (inputs.need("advantages"), advantage_mean)
    count = inputs.mask.sum().clamp(min=1)
    left, right = (values - (values.sum() / count if mean is None else mean) for values, mean in means)
    return torch.where(inputs.mask, left * right, 0.0)


@policy_loss()
def clip_cov_loss(
    inputs: LossInputs,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    log_prob_mean: float | None = None,
    advantage_mean: float | None = None,
) -> PolicyTerm:
    """ppo_clip's loss, 0 on the tokens of largest covariance: ⌈cov_fraction · n⌉ at most, of those unclipped
    with cov_low < cov < cov_high.

    n and the means are those of the micro-batch, as in the authors' code, so the choice depends on how a
    batch is divided; with cov_fraction = 1 and both means given it does not. We take the largest where the
    authors draw at random. `clip_ratio/cov`: share of tokens left out. Paper: Clip-Cov, 2505.22617.
    """
    term = _clip(_token_ratio(inputs), advantages, clip_low, clip_high)
    assert term.clipped
    covariances = compute_covariances(inputs, log_prob_mean, advantage_mean)
    inside = (covariances > cov_low) & (covariances < cov_high) & ~torch.logical_or(*term.clipped)
    chosen = _select_largest(covariances, inside, inputs.mask, cov_fraction)
    return term._replace(
        token_losses=torch.where(chosen, 0.0, term.token_losses), shares={"clip_ratio/cov": chosen}
    )


@policy_loss()
def kl_cov_loss(
    inputs: LossInputs,
    advantages: Tensor,
    *,
    cov_fraction: float = 2e-3,
    cov_low: float = 0.0,
    cov_kl_coef: float = 1.0,
    log_prob_mean: float | None = None,
    advantage_mean: float | None = None,
) -> PolicyTerm:
    """−r·A, plus cov_kl_coef·|lp − old| on the ⌈cov_fraction · n⌉ tokens of largest covariance above cov_low.
    No clip.

    |lp − old| stands for the KL of old and policy, as in the authors' code; where lp = old it has no
    gradient, so the first update on a batch is plain importance sampling. n and the means: see clip_cov.
    `clip_ratio/cov`: share of penalised tokens. Paper: KL-Cov, 2505.22617.
    """
    log_ratio = compute_log_ratio(inputs.log_probs, inputs.need_old())
    ratio = torch.exp(log_ratio)
    covariances = compute_covariances(inputs, log_prob_mean, advantage_mean)
    chosen = _select_largest(covariances, covariances > cov_low, inputs.mask, cov_fraction)
    losses = -advantages * ratio + torch.where(chosen, cov_kl_coef * log_ratio.abs(), 0.0)
    return PolicyTerm(losses, ratio, shares={"clip_ratio/cov": chosen})


def _select_largest(values: Tensor, candidates: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """[B, T] bool: candidates among the ⌈fraction · n⌉ largest of the candidates' values, n over the mask."""
    ranked = torch.where(candidates, values, -torch.inf)
    largest = select_top_fraction(ranked.flatten()[None], mask.flatten()[None], fraction)
    return largest.view_as(mask) & candidates


# --- pieces -------------------------------------------------------------------------------------------------


def _token_ratio(inputs: LossInputs) -> Tensor:
    return compute_token_ratio(inputs.log_probs, inputs.need_old())


def _find_clipped(values: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(tokens below `low` with A < 0, tokens above `high` with A > 0), [B, T] bool: they go outwards."""
    return (advantages < 0) & (values < low), (advantages > 0) & (values > high)


def _stop_beyond(
    inputs: LossInputs, advantages: Tensor, distance: Tensor, low: float, high: float
) -> PolicyTerm:
    """−A·exp(lp − mu), 0 where the update would go on beyond a signed distance of −low or high."""
    ratio = compute_token_ratio(inputs.log_probs, inputs.mu)
    below, above = clipped = _find_clipped(distance, advantages, -low, high)
    return PolicyTerm(torch.where(below | above, 0.0, -advantages * ratio), ratio, clipped)


def _clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyTerm:
    """−min(r·A, clip(r)·A)."""
    bounds = 1.0 - clip_low, 1.0 + clip_high
    losses = -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
    return PolicyTerm(losses, ratio, _find_clipped(ratio, advantages, *bounds))
