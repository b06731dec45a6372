"""Per-token estimates of KL(policy || reference) from sampled tokens, d = policy − ref in nats. [B, T] in,
[B, T] out.

    name   value            used on rewards            used as a loss: expected gradient
    k1     d                right (2203.02155)         zero: it trains nothing
    k2     d²/2             biased                     that of KL(policy || reference): right
    k3     e^−d − 1 + d     unbiased, low variance     that of KL(reference || policy): another direction

Values agree near d = 0, gradients do not: p = [.5, .3, .2], q = [.4, .4, .2] has KL .02527 and the three
gradients above differ already in the second decimal. Expectations are over tokens that the policy sampled.
Sources: Schulman 2020, "Approximating KL Divergence"; 2506.09477; 2510.01555. Positions outside a mask are
computed but meaningless: mask after. A NaN stays in its own position.

Where tokens were sampled by another policy, or to have the right gradient from any of them, the estimate is
multiplied by the ratio policy / sampler with the gradient going through both (2512.02556): see
compute_kl_penalty. Where the logits of both models are at hand, compute_exact_kl needs no sample. A backend
that has the reference gives KL(reference || policy) itself for kl_estimator = "exact": its gradient by the
policy's logits is p_policy − p_reference, what that of k3 is on average.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rollouts.errors import require
from rollouts.losses.inputs import (
    check_numbers,
    compute_log_ratio,
    compute_token_ratio,
    find_function,
    reduce_loss,
)

KlEstimator = Callable[[Tensor, Tensor], Tensor]
"""(policy log-probs, reference log-probs), both [B, T] in nats -> [B, T]."""
WeighFn = Callable[[Tensor, Tensor], Tensor]
"""(policy log-probs, reference log-probs) of one shape -> a weight for each."""


def kl_k1(policy_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """policy − ref: unbiased, of either sign."""
    return policy_log_probs - ref_log_probs


def kl_k2(policy_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(policy − ref)²/2: never negative, biased in value, with the gradient of KL(policy || reference)."""
    return 0.5 * (policy_log_probs - ref_log_probs).square()


def kl_k3(policy_log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(ref − policy) − (ref − policy) − 1: never negative, unbiased. We do not clip; the loss does."""
    difference = ref_log_probs - policy_log_probs
    return torch.exp(difference) - difference - 1.0


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def make_truncated_kl(estimator: KlEstimator, cap: float) -> KlEstimator:
    """min(estimator, cap): a token beyond the cap, in nats, counts as the cap and has no gradient. Raises
    ConfigError if cap is not positive.
    """
    check_numbers("kl", cap=cap)
    return lambda policy_log_probs, ref_log_probs: estimator(policy_log_probs, ref_log_probs).clamp(max=cap)


def make_weighted_kl(estimator: KlEstimator, weigh: WeighFn) -> KlEstimator:
    """weigh(policy, ref) · estimator, the weights [B, T] without gradient: `lambda policy, ref: ref.exp()`
    trusts a confident reference more.
    """

    return lambda policy, ref: weigh(policy.detach(), ref.detach()).detach() * estimator(policy, ref)


def compute_kl_penalty(
    policy_log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: str | KlEstimator,
    *,
    sampler_log_probs: Tensor | None = None,
) -> Tensor:
    """[B, T] KL term of a loss. estimator: "k1", "k2" or "k3" with policy − ref held within ±20, so that a
    token that a model cannot give has a finite term without gradient; module:function, or a function.

    With sampler_log_probs the estimate is multiplied by exp(policy − sampler), held within e^±20, and the
    gradient goes through both factors: unbiased for tokens of the sampler, and the expected gradient of "k1"
    and "k3" is that of KL(policy || reference). Paper: DeepSeek-V3.2, 2512.02556. Raises ConfigError for "k1"
    without it, whose expected gradient is zero, and for an unknown name.
    """
    require(
        estimator != "k1" or sampler_log_probs is not None,
        "kl_estimator='k1' in a loss has an expected gradient of zero; use 'k2' or 'k3', set"
        " kl_importance=true, or put the KL term in the reward",
    )
    both = policy_log_probs, ref_log_probs
    if isinstance(estimator, str):
        if estimator in KL_ESTIMATORS:
            both = compute_log_ratio(*both), torch.zeros_like(ref_log_probs)
        estimator = find_function(
            "kl_estimator", estimator, KL_ESTIMATORS, takes="(policy_log_probs, ref_log_probs)"
        )
    found = estimator(*both)
    if sampler_log_probs is None:
        return found
    return compute_token_ratio(policy_log_probs, sampler_log_probs.detach()) * found


def compute_batch_kl(
    policy_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: str | KlEstimator = "k1"
) -> Tensor:
    """Scalar, in nats: the mean of an estimate over the masked tokens [B, T], which the policy sampled; 0
    without a token. estimator: any name of KL_ESTIMATORS, module:function, or a function.

    Its gradient is that of `compute_kl_penalty` with the policy as the sampler. Raises ConfigError for an
    unknown name.
    """
    kl = compute_kl_penalty(policy_log_probs, ref_log_probs, estimator, sampler_log_probs=policy_log_probs)
    total, count = reduce_loss(kl, mask, "tokens")
    return total / max(count, 1.0)


def compute_exact_kl(
    policy_logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0, weigh: WeighFn | None = None
) -> Tensor:
    """[N] Σ_v p_v·(log p_v − log q_v) over the vocabulary of softmax(logits / temperature), both logits [N,
    V]: exact, no sample needed.

    A token that the policy cannot give, logit −inf, adds nothing; one that only the policy can give makes it
    inf, however small its probability. `weigh(log p, log q)` gives weights [N, V] without gradient for the
    terms of the sum, and a term of weight 0 adds nothing whatever it holds: 1 where the reference's
    probability is among its k largest, 0 elsewhere, truncates it. Gradients go to both logits. Memory: a few
    times the logits; cut N into pieces.
    """
    log_p, log_q = ((logits / temperature).log_softmax(-1) for logits in (policy_logits, ref_logits))
    return sum_kl_terms(log_p, log_q, weigh=weigh)


def sum_kl_terms(log_p: Tensor, log_q: Tensor, *, weigh: WeighFn | None = None) -> Tensor:
    """[N] Σ_v w_v·p_v·(log p_v − log q_v) of log-probs [N, V], with the rules and the weights of
    `compute_exact_kl`.
    """
    weights = torch.ones_like(log_p) if weigh is None else weigh(log_p.detach(), log_q.detach()).detach()
    counted = (log_p != -torch.inf) & (weights != 0)
    only_policy = counted & (log_q == -torch.inf)
    # both factors are replaced where a term is known: their product there may be 0 · inf, and so would be its
    # gradient
    held_p, held_q = (torch.where(counted & ~only_policy, each, 0.0) for each in (log_p, log_q))
    terms = held_p.exp() * (held_p - held_q) * weights
    return torch.where(only_policy, torch.inf, terms).sum(-1)
