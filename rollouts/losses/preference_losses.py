"""Losses on pairs of responses of which one is preferred. They take log-probs of whole responses, [P] nats,
and are minimised.

    π_c, π_r     log-probs of the chosen and the rejected response under the policy, with gradient
    ref_c, ref_r the same under the frozen reference, without
    Δ_c = π_c − ref_c, Δ_r = π_r − ref_r, Δ = Δ_c − Δ_r; σ is the logistic function; |y| is a response's number of tokens

Every loss returns the sum over pairs, with the number of pairs as its count: divide by the count of the whole
batch. A pair's loss depends on no other pair, so any split into micro-batches that keeps pairs whole gives
the same sum and gradient. No pair at all gives (0 with a zero gradient, 0). A log-prob that is not finite, of
policy or reference, makes the loss of its pair and the gradient to its row NaN: the step is skipped.

Metrics (means over pairs, without gradient):
    rewards/chosen, rewards/rejected     β·Δ_c, β·Δ_r; β·π/|y| for `simpo` and `orpo`, β·π for `cpo`, which have no reference
    rewards/margins                      their difference
    rewards/accuracies                   share of pairs with a positive margin; a tie is not one
    logps/chosen, logps/rejected         π_c, π_r; divided by |y| for `simpo` and `orpo`
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollouts.errors import ConfigError
from rollouts.losses.inputs import LossOutput
from rollouts.losses.preference_pairs import (
    LinearisedLoss,
    PairLogProbs,
    check_one_per_pair,
    linearise_row_loss,
    ones_like_mask,
    spoil_losses,
)
from rollouts.losses.reductions import collect_token_metrics

HIGHEST_MEAN_LOG_PROB = (
    -1e-6
)  # odds are those of a probability of at most 1 − 1e-6: at 1 they would be infinite


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> LossOutput:
    """−(1 − ε)·log σ(βΔ) − ε·log σ(−βΔ) per pair; ε = label_smoothing, the share of labels believed wrong. ε
    > 0 is conservative DPO.

    Gradient to π_c: −β·((1 − ε)·σ(−βΔ) − ε·σ(βΔ)), to π_r its negative. Papers: 2305.18290; Mitchell 2023
    (cDPO). Raises ConfigError unless beta > 0 and 0 <= label_smoothing < 0.5.
    """
    _check_beta("dpo", beta)
    _check_smoothing("dpo", label_smoothing)
    pairs = _compare("dpo", chosen, rejected, ref_chosen, ref_rejected)
    logits = beta * (pairs.chosen - pairs.rejected)
    losses = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def robust_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> LossOutput:
    """(−(1 − ε)·log σ(βΔ) + ε·log σ(−βΔ)) / (1 − 2ε) per pair: unbiased for DPO's loss when a share ε of the
    labels is flipped.

    May be negative. Paper: 2403.00409. Raises ConfigError unless beta > 0 and 0 <= label_smoothing < 0.5.
    """
    _check_beta("robust_dpo", beta)
    _check_smoothing("robust_dpo", label_smoothing)
    pairs = _compare("robust_dpo", chosen, rejected, ref_chosen, ref_rejected)
    logits = beta * (pairs.chosen - pairs.rejected)
    losses = (-(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)) / (
        1 - 2 * label_smoothing
    )
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def ipo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """(Δ − 1/(2β))² per pair, of log-prob sums; β is the paper's τ. Paper: 2310.12036, eq. 17. Raises
    ConfigError unless beta > 0.
    """
    _check_beta("ipo", beta)
    pairs = _compare("ipo", chosen, rejected, ref_chosen, ref_rejected)
    losses = (pairs.chosen - pairs.rejected - 1 / (2 * beta)).square()
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def averaged_ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """(Δ_c/|y_c| − Δ_r/|y_r| − 1/(2β))² per pair: IPO on means over tokens, which does not grow with length;
    what TRL calls `ipo`.

    The rewards in the metrics are of the sums, as in DPO. Paper: 2310.12036. Raises ConfigError unless beta >
    0.
    """
    _check_beta("averaged_ipo", beta)
    pairs = _compare("averaged_ipo", chosen, rejected, ref_chosen, ref_rejected)
    check_one_per_pair(
        "averaged_ipo", chosen=chosen, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths
    )
    losses = (pairs.chosen / chosen_lengths - pairs.rejected / rejected_lengths - 1 / (2 * beta)).square()
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def hinge_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """max(0, 1 − βΔ) per pair: no gradient beyond a margin of 1. Papers: SLiC-HF, 2305.10425; 2309.06657.
    Raises ConfigError unless beta > 0.
    """
    _check_beta("hinge", beta)
    pairs = _compare("hinge", chosen, rejected, ref_chosen, ref_rejected)
    losses = torch.relu(1 - beta * (pairs.chosen - pairs.rejected))
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def length_normalised_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 0.1,
) -> LossOutput:
    """−log σ(β(Δ_c/|y_c| − Δ_r/|y_r|)) per pair. The means are small numbers: betas of 2 to 10 are usual.
    Paper: Tülu 3, 2411.15124.

    The rewards in the metrics are of the sums, as in DPO. Raises ConfigError unless beta > 0.
    """
    _check_beta("length_normalised_dpo", beta)
    pairs = _compare("length_normalised_dpo", chosen, rejected, ref_chosen, ref_rejected)
    check_one_per_pair(
        "length_normalised_dpo",
        chosen=chosen,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )
    losses = -logsigmoid(beta * (pairs.chosen / chosen_lengths - pairs.rejected / rejected_lengths))
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def exo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> LossOutput:
    """KL(q || p) per pair, q = (σ(βΔ), σ(−βΔ)), p = (1 − ε, ε): reverse KL to the labels where DPO has the
    forward one. Paper: 2402.00856.

    Raises ConfigError unless beta > 0 and 0 < label_smoothing < 0.5: with ε = 0 the loss would be infinite.
    """
    _check_beta("exo", beta)
    _check_smoothing("exo", label_smoothing, zero_allowed=False)
    pairs = _compare("exo", chosen, rejected, ref_chosen, ref_rejected)
    logits = beta * (pairs.chosen - pairs.rejected)
    losses = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-label_smoothing)) + torch.sigmoid(
        -logits
    ) * (logsigmoid(-logits) - math.log(label_smoothing))
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def nca_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """−log σ(βΔ_c) − ½·log σ(−βΔ_c) − ½·log σ(−βΔ_r) per pair: holds up the chosen log-prob itself. Paper:
    2402.05369.

    Raises ConfigError unless beta > 0.
    """
    _check_beta("nca", beta)
    pairs = _compare("nca", chosen, rejected, ref_chosen, ref_rejected)
    good, bad = beta * pairs.chosen, beta * pairs.rejected
    return _finish(
        -logsigmoid(good) - 0.5 * logsigmoid(-good) - 0.5 * logsigmoid(-bad), good, bad, chosen, rejected
    )


def sppo_hard_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """(Δ_c − 1/(2β))² + (Δ_r + 1/(2β))² per pair: self-play with a certain winner. Paper: 2405.00675. Raises
    ConfigError unless beta > 0.
    """
    _check_beta("sppo_hard", beta)
    pairs = _compare("sppo_hard", chosen, rejected, ref_chosen, ref_rejected)
    losses = (pairs.chosen - 0.5 / beta).square() + (pairs.rejected + 0.5 / beta).square()
    return _finish(losses, beta * pairs.chosen, beta * pairs.rejected, chosen, rejected)


def apo_zero_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """(1 − σ(βΔ_c)) + σ(βΔ_r) per pair: for chosen responses better than the policy's own. Paper: 2408.06266,
    eq. 7.

    Raises ConfigError unless beta > 0.
    """
    _check_beta("apo_zero", beta)
    pairs = _compare("apo_zero", chosen, rejected, ref_chosen, ref_rejected)
    good, bad = beta * pairs.chosen, beta * pairs.rejected
    return _finish(torch.sigmoid(-good) + torch.sigmoid(bad), good, bad, chosen, rejected)


def apo_down_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """σ(βΔ_c) + (1 − σ(βΔ)) per pair: for chosen responses worse than the policy's own. Paper: 2408.06266,
    eq. 8.

    Raises ConfigError unless beta > 0.
    """
    _check_beta("apo_down", beta)
    pairs = _compare("apo_down", chosen, rejected, ref_chosen, ref_rejected)
    good, bad = beta * pairs.chosen, beta * pairs.rejected
    return _finish(torch.sigmoid(good) + torch.sigmoid(bad - good), good, bad, chosen, rejected)


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> LossOutput:
    """−log σ(β·π_c/|y_c| − β·π_r/|y_r| − γ) per pair: no reference. Paper: 2405.14734.

    Raises ConfigError unless beta > 0 and gamma >= 0.
    """
    _check_beta("simpo", beta)
    if not gamma >= 0:
        raise ConfigError(
            f"simpo: gamma={gamma} must not be negative: it is the margin that the chosen response should win"
            " by; 1.0 is usual"
        )
    check_one_per_pair(
        "simpo",
        chosen=chosen,
        rejected=rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )
    good, bad = chosen / chosen_lengths, rejected / rejected_lengths
    return _finish(-logsigmoid(beta * (good - bad) - gamma), beta * good, beta * bad, good, bad)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
) -> LossOutput:
    """DPO's loss without a reference, of β(π_c − π_r), plus nll_weight times −π_c/|y_c|, per pair. Paper:
    2401.08417.

    `loss/nll` is the second part. Raises ConfigError unless beta > 0, 0 <= label_smoothing < 0.5 and
    nll_weight >= 0.
    """
    _check_beta("cpo", beta)
    _check_smoothing("cpo", label_smoothing)
    if not nll_weight >= 0:
        raise ConfigError(
            f"cpo: nll_weight={nll_weight} must not be negative; 1.0 is the paper's, 0 leaves the"
            " likelihood out"
        )
    check_one_per_pair("cpo", chosen=chosen, rejected=rejected, chosen_lengths=chosen_lengths)
    logits = beta * (chosen - rejected)
    nll = -chosen / chosen_lengths
    losses = (
        -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits) + nll_weight * nll
    )
    return _finish(losses, beta * chosen, beta * rejected, chosen, rejected, {"loss/nll": nll})


def orpo_loss(
    chosen: Tensor, rejected: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor, *, beta: float = 0.1
) -> LossOutput:
    """−p_c − β·log σ(log odds(p_c) − log odds(p_r)) per pair, p = π/|y| the mean log-prob, odds = e^p/(1 −
    e^p): likelihood and odds ratio.

    β is the paper's λ. 1 − e^p is computed without cancellation; a mean log-prob above −1e-6 counts as −1e-6
    in the odds, with no gradient there. `loss/nll` is the first part, `log_odds/mean` the log of the odds
    ratio. Paper: 2403.07691. Raises ConfigError unless beta >= 0.
    """
    if not beta >= 0:
        raise ConfigError(
            f"orpo: beta={beta} must not be negative: it weighs the odds ratio against the likelihood; 0.1 is"
            " usual"
        )
    check_one_per_pair(
        "orpo",
        chosen=chosen,
        rejected=rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )
    good, bad = chosen / chosen_lengths, rejected / rejected_lengths
    log_odds = compute_log_odds(good) - compute_log_odds(bad)
    return _finish(
        -good - beta * logsigmoid(log_odds),
        beta * good,
        beta * bad,
        good,
        bad,
        {"loss/nll": -good, "log_odds/mean": log_odds},
    )


def compute_log_odds(log_probs: Tensor) -> Tensor:
    """log(e^x / (1 − e^x)) of log-probs x, elementwise, exact near 0 as well as far below; x above −1e-6
    counts as −1e-6.
    """
    held = log_probs.clamp(max=HIGHEST_MEAN_LOG_PROB)
    near_zero = held > -math.log(2.0)
    near = torch.log(-torch.expm1(torch.where(near_zero, held, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, held)))
    return held - torch.where(near_zero, near, far)


PreferenceLoss = Callable[..., LossOutput]
"""Takes fields of PairLogProbs by their names, in any choice, and numbers by keyword."""

PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "dpo": dpo_loss,
    "robust_dpo": robust_dpo_loss,
    "ipo": ipo_loss,
    "averaged_ipo": averaged_ipo_loss,
    "hinge": hinge_loss,
    "length_normalised_dpo": length_normalised_dpo_loss,
    "exo": exo_loss,
    "nca": nca_loss,
    "sppo_hard": sppo_hard_loss,
    "apo_zero": apo_zero_loss,
    "apo_down": apo_down_loss,
    "simpo": simpo_loss,
    "cpo": cpo_loss,
    "orpo": orpo_loss,
}

TRL_LOSS_TYPES: dict[str, str] = {
    "sigmoid": "dpo",
    "robust": "robust_dpo",
    "ipo": "averaged_ipo",  # TRL divides by the lengths
    "hinge": "hinge",
    "sigmoid_norm": "length_normalised_dpo",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "sppo_hard": "sppo_hard",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "simpo": "simpo",  # of its CPOTrainer
}
"""`loss_type` of TRL 1.16's DPOTrainer -> our name. Its aot, aot_unpaired, bco_pair, discopop and sft have no counterpart here."""


def resolve_preference_loss(name: str | PreferenceLoss) -> PreferenceLoss:
    """The loss of a key of PREFERENCE_LOSSES; a function is returned as it is.

    Raises ConfigError for another name, with the nearest key, or with ours where it is TRL's.
    """
    if not isinstance(name, str):
        return name
    if name in PREFERENCE_LOSSES:
        return PREFERENCE_LOSSES[name]
    nearest = (
        TRL_LOSS_TYPES.get(name) or difflib.get_close_matches(name, PREFERENCE_LOSSES, n=1, cutoff=0.0)[0]
    )
    raise ConfigError(
        f"preference loss {name!r} is not known; did you mean {nearest!r}? Known:"
        f" {', '.join(PREFERENCE_LOSSES)}, or a function"
    )


def compute_preference_loss(pairs: PairLogProbs, loss: str | PreferenceLoss, **params: float) -> LossOutput:
    """A loss of PREFERENCE_LOSSES, or your own function, on pairs: it is given the fields of PairLogProbs
    that it takes by name.

    Raises ConfigError if it needs a reference and the pairs have none, and for a parameter that it does not
    take.
    """
    function = resolve_preference_loss(loss)
    signature = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values())
    fields = {name: value for name, value in pairs._asdict().items() if name in signature}
    missing = [name for name, value in fields.items() if value is None]
    if missing:
        raise ConfigError(
            f"preference loss {loss!r} needs {' and '.join(missing)} and the pairs have none; score them with"
            " a reference"
        )
    for key in params:
        if not takes_any and (key in fields or key not in signature):
            accepted = ", ".join(name for name in signature if name not in fields)
            raise ConfigError(f"preference loss {loss!r} has no parameter {key!r}; it takes {accepted}")
    return function(**fields, **params)


def linearise_preference_loss(
    pairs: PairLogProbs, loss: str | PreferenceLoss, **params: float
) -> LinearisedLoss:
    """`linearise_row_loss` of `compute_preference_loss`: its advantages are those of the chosen [P] and of
    the rejected rows [P].
    """

    def of_sums(chosen: Tensor, rejected: Tensor) -> LossOutput:
        return compute_preference_loss(pairs._replace(chosen=chosen, rejected=rejected), loss, **params)

    return linearise_row_loss(of_sums, pairs.chosen, pairs.rejected)


class _LogRatios(NamedTuple):
    chosen: Tensor  # [P] Δ_c
    rejected: Tensor  # [P] Δ_r


def _compare(
    name: str, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> _LogRatios:
    check_one_per_pair(
        name, chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    return _LogRatios(chosen - ref_chosen.detach(), rejected - ref_rejected.detach())


def _finish(
    losses: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    more: dict[str, Tensor] | None = None,
) -> LossOutput:
    margins = (chosen_rewards - rejected_rewards).detach()
    losses = spoil_losses(losses, chosen_rewards, rejected_rewards)
    means = {
        "rewards/chosen": chosen_rewards.detach(),
        "rewards/rejected": rejected_rewards.detach(),
        "rewards/margins": margins,
        "rewards/accuracies": margins > 0,
        "logps/chosen": chosen.detach(),
        "logps/rejected": rejected.detach(),
    } | {name: values.detach() for name, values in (more or {}).items()}
    return LossOutput(
        losses.sum(), float(len(losses)), collect_token_metrics(means, {}, ones_like_mask(losses))
    )


def _check_beta(name: str, beta: float) -> None:
    if not beta > 0:
        raise ConfigError(
            f"{name}: beta={beta} must be above 0: it scales log-prob differences to rewards; 0.1 is usual,"
            " 2.0 for simpo"
        )


def _check_smoothing(name: str, label_smoothing: float, *, zero_allowed: bool = True) -> None:
    if not (0 <= label_smoothing < 0.5) or (label_smoothing == 0 and not zero_allowed):
        rule = "at least 0" if zero_allowed else "above 0"
        raise ConfigError(
            f"{name}: label_smoothing={label_smoothing} must be {rule} and below 0.5: it is the share of"
            " labels believed wrong"
        )
