"""KTO: responses that are each marked good or bad, without pairs. Axes: B rows. All in nats."""

import torch
from torch import Tensor

from rollouts.losses.inputs import LossOutput, check_numbers, require
from rollouts.losses.preference_losses import check_one_per_pair, spoil_losses
from rollouts.losses.reductions import collect_token_metrics, sum_rows

LOSS_AVERSION = (1.0, 4 / 3)  # range of λ_D·n_D / (λ_U·n_U) that the paper recommends


def kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    *,
    reference_point: float | Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOutput:
    """λ_D·(1 − σ(β(Δ − z₀))) for good responses, λ_U·(1 − σ(β(z₀ − Δ))) for bad ones; Δ = log_probs −
    ref_log_probs, sums over a response [B].

    desirable [B] is boolean. z₀ = reference_point, without gradient, is one number for the whole batch
    (`compute_kto_reference_point`), so that micro-batches add up; 0 gives TRL's `apo_zero_unpaired`. The sum
    is over rows, the count is B. A batch of one kind only trains on that kind: the metrics of the other are
    absent. A log-prob that is not finite makes the loss and the gradient of its row NaN, a z₀ that is not
    finite the loss of all rows. Paper: 2402.01306, eq. 7 and 8.

    Metrics: rewards/chosen and rewards/rejected (mean βΔ of the good and of the bad), logps/chosen,
    logps/rejected, kto/reference_point. The margin is the difference of the two rewards, taken after merging.
    Raises ConfigError unless beta > 0 and the weights are not negative and not both 0; ValueError on shapes
    that differ.
    """
    check_numbers("kto", beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    require(
        desirable_weight + undesirable_weight > 0,
        "kto: both weights are 0; set desirable_weight above 0",
    )
    check_one_per_pair("kto", log_probs=log_probs, ref_log_probs=ref_log_probs, desirable=desirable)
    good = desirable.bool()
    point = torch.as_tensor(reference_point, dtype=log_probs.dtype, device=log_probs.device).detach()
    log_ratios = log_probs - ref_log_probs.detach()
    weights = torch.full_like(log_ratios, undesirable_weight).masked_fill(good, desirable_weight)
    losses = weights * torch.sigmoid(beta * torch.where(good, point - log_ratios, log_ratios - point))
    losses = spoil_losses(losses, log_ratios, point.expand_as(losses))
    output = sum_rows(losses, {"kto/reference_point": point.expand_as(losses)})
    for kind, mask in (("chosen", good), ("rejected", ~good)):
        means = {f"rewards/{kind}": beta * log_ratios, f"logps/{kind}": log_probs}
        output.metrics.update(collect_token_metrics(means, mask))
    return output


def compute_kto_reference_point(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """z₀ = max(0, mean of log_probs − ref_log_probs) over the whole batch [B], a scalar without gradient: an
    estimate of KL(policy || reference).

    The paper takes it from mismatched pairs: log-probs of each prompt with another prompt's response, under
    both models (whose response: rollouts.data.samples.mismatch_completions). Given the batch's own
    responses it is biased upwards where training has already raised them, and costs no further pass. It is of
    the whole batch: with several micro-batches or ranks average the differences over all before calling.
    Raises ValueError if there is no row, for there is no mean.
    """
    check_one_per_pair("kto", log_probs=log_probs, ref_log_probs=ref_log_probs)
    if len(log_probs) == 0:
        raise ValueError(
            "kto: no row to estimate the reference point from; give reference_point=0.0 to go without"
        )
    return (log_probs - ref_log_probs).detach().mean().clamp(min=0)


def compute_kto_weights(num_desirable: int, num_undesirable: int) -> tuple[float, float]:
    """(desirable_weight, undesirable_weight), one of them 1 and the other at least 1, that bring λ_D·n_D /
    (λ_U·n_U) into [1, 4/3].

    Both are 1 where the numbers already stand so. Paper: 2402.01306, section 4. Raises ValueError if a kind
    is missing: no weight makes up for it.
    """
    if num_desirable < 1 or num_undesirable < 1:
        raise ValueError(
            f"{num_desirable} desirable and {num_undesirable} undesirable rows; weights balance two kinds"
            " that are both there"
        )
    ratio, (lowest, highest) = num_desirable / num_undesirable, LOSS_AVERSION
    return max(lowest / ratio, 1.0), max(ratio / highest, 1.0)
