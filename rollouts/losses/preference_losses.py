"""Losses on pairs of responses of which one is preferred. They take log-probs of whole responses, [P] nats,
and are minimised. Axes: B rows, P pairs, T positions.

    π_c, π_r     log-probs of the chosen and the rejected response under the policy, with gradient
    ref_c, ref_r the same under the frozen reference, without
    Δ_c = π_c − ref_c, Δ_r = π_r − ref_r, Δ = Δ_c − Δ_r; σ is the logistic function; |y| a response's tokens

Every loss returns the sum over pairs, with the number of pairs as its count: divide by the count of the whole
batch. A pair's loss depends on no other pair, so any split into micro-batches that keeps pairs whole gives
the same sum and gradient. No pair at all gives (0 with a zero gradient, 0). A log-prob that is not finite, of
policy or reference, makes the loss of its pair and the gradient to its row NaN: the step is skipped. Every
loss raises ConfigError on a parameter that breaks its rule and ValueError on shapes that differ.

Metrics (means over pairs, without gradient):
    rewards/chosen, rewards/rejected     β·Δ_c, β·Δ_r; else β·π/|y| (`simpo`, `orpo`) or β·π (`cpo`)
    rewards/margins                      their difference
    rewards/accuracies                   share of pairs with a positive margin; a tie is not one
    logps/chosen, logps/rejected         π_c, π_r; divided by |y| for `simpo` and `orpo`

KTO: responses that are each marked good or bad, without pairs. Axes: B rows. All in nats.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollouts.errors import ConfigError, check_keywords, require
from rollouts.losses.inputs import (
    LossInputs,
    LossOutput,
    bind_numbers,
    check_numbers,
    clear_masked,
    collect_token_metrics,
    find_function,
    sum_rows,
)

HIGHEST_MEAN_LOG_PROB = -1e-6  # odds are infinite at a probability of 1; at most 1 − 1e-6 counts


class PairLogProbs(NamedTuple):
    """Sums over the trained tokens of both responses. The names are the arguments of the losses below."""

    chosen: Tensor  # [P] with gradient: log-prob of the preferred response
    rejected: Tensor  # [P] with gradient
    ref_chosen: Tensor | None  # [P] of the frozen reference; None: the batch was not scored by one
    ref_rejected: Tensor | None  # [P]
    chosen_lengths: Tensor  # [P] tokens of the response, at least 1, in the dtype of the log-probs
    rejected_lengths: Tensor  # [P]


PreferenceLoss = Callable[..., LossOutput]
"""Takes fields of PairLogProbs by their names, in any choice, and numbers by keyword."""


WithMetrics = tuple[Tensor, dict[str, Tensor]]
Formula = Callable[..., Tensor | WithMetrics]
"""Its arguments are what it takes of a pair, all [P] with gradient, and its numbers: beta, and those with a
default.
    good, bad              Δ_c and Δ_r of a loss with a reference, else π_c and π_r
    good_mean, bad_mean    the same divided by the response's tokens
    margin, mean_margin    the difference of the two
    and fields of PairLogProbs
It answers the losses [P], or (these, more metrics [P]).
"""


# --- the table ----------------------------------------------------------------------------------------------


def _smooth(logits: Tensor, share: float) -> Tensor:
    """DPO's loss where a share of the labels is believed wrong."""
    return -(1 - share) * logsigmoid(logits) - share * logsigmoid(-logits)


def _compute_exo(margin: Tensor, beta: float, label_smoothing: float = 1e-3) -> Tensor:
    logits = beta * margin
    right = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-label_smoothing))
    return right + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(label_smoothing))


def _compute_rpo(
    margin: Tensor,
    chosen: Tensor,
    chosen_lengths: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
) -> WithMetrics:
    mean = chosen / chosen_lengths
    return _smooth(beta * margin, label_smoothing) - nll_weight * mean, {"loss/nll": -mean}


def _compute_orpo(good_mean: Tensor, bad_mean: Tensor, beta: float) -> WithMetrics:
    log_odds = compute_log_odds(good_mean) - compute_log_odds(bad_mean)
    return -good_mean - beta * logsigmoid(log_odds), {"loss/nll": -good_mean, "log_odds/mean": log_odds}


def compute_log_odds(log_probs: Tensor) -> Tensor:
    """log(e^x / (1 − e^x)) of log-probs x, exact near 0 and far below; x above −1e-6 counts as −1e-6."""
    held = log_probs.clamp(max=HIGHEST_MEAN_LOG_PROB)
    return held - torch.log(-torch.expm1(held))


TABLE: dict[str, Formula] = {
    # −(1 − ε)·log σ(βΔ) − ε·log σ(−βΔ), ε = label_smoothing, the share of labels believed wrong; ε > 0 is
    # conservative DPO. 2305.18290; Mitchell 2023 (cDPO)
    "dpo": lambda margin, beta, label_smoothing=0.0: _smooth(beta * margin, label_smoothing),
    # DPO's loss plus nll_weight times −π_c/|y_c|, which holds up the chosen one; `loss/nll` is the second
    # part. Iterative RPO, 2404.19733; TRL's rpo_alpha is nll_weight
    "rpo": _compute_rpo,
    # (−(1 − ε)·log σ(βΔ) + ε·log σ(−βΔ)) / (1 − 2ε): unbiased for DPO's loss when a share ε of the labels is
    # flipped; may be negative. 2403.00409
    "robust_dpo": lambda margin, beta, label_smoothing=0.1: (
        (label_smoothing * logsigmoid(-beta * margin) - (1 - label_smoothing) * logsigmoid(beta * margin))
        / (1 - 2 * label_smoothing)
    ),
    # (Δ − 1/(2β))², of log-prob sums; β is the paper's τ. 2310.12036, eq. 17
    "ipo": lambda margin, beta: (margin - 0.5 / beta).square(),
    # (Δ_c/|y_c| − Δ_r/|y_r| − 1/(2β))²: IPO on means over tokens, which does not grow with length; what TRL
    # calls `ipo`. The rewards in the metrics are of the sums, as in DPO
    "averaged_ipo": lambda mean_margin, beta: (mean_margin - 0.5 / beta).square(),
    # max(0, 1 − βΔ): no gradient beyond a margin of 1. SLiC-HF, 2305.10425; 2309.06657
    "hinge": lambda margin, beta: torch.relu(1 - beta * margin),
    # −log σ(β(Δ_c/|y_c| − Δ_r/|y_r|)). The means are small numbers: betas of 2 to 10 are usual. The rewards
    # in the metrics are of the sums, as in DPO. Tülu 3, 2411.15124
    "length_normalised_dpo": lambda mean_margin, beta: -logsigmoid(beta * mean_margin),
    # KL(q || p), q = (σ(βΔ), σ(−βΔ)), p = (1 − ε, ε): reverse KL to the labels where DPO has the forward one;
    # infinite for ε = 0. 2402.00856
    "exo": _compute_exo,
    # −log σ(βΔ_c) − ½·log σ(−βΔ_c) − ½·log σ(−βΔ_r): holds up the chosen log-prob itself. 2402.05369
    "nca": lambda good, bad, beta: (
        -logsigmoid(beta * good) - 0.5 * (logsigmoid(-beta * good) + logsigmoid(-beta * bad))
    ),
    # (Δ_c − 1/(2β))² + (Δ_r + 1/(2β))²: self-play with a certain winner. 2405.00675
    "sppo_hard": lambda good, bad, beta: (good - 0.5 / beta).square() + (bad + 0.5 / beta).square(),
    # (1 − σ(βΔ_c)) + σ(βΔ_r): for chosen responses better than the policy's. 2408.06266, eq. 7
    "apo_zero": lambda good, bad, beta: torch.sigmoid(-beta * good) + torch.sigmoid(beta * bad),
    # σ(βΔ_c) + (1 − σ(βΔ)): for chosen responses worse than the policy's. 2408.06266, eq. 8
    "apo_down": lambda good, margin, beta: torch.sigmoid(beta * good) + torch.sigmoid(-beta * margin),
    # −log σ(β·π_c/|y_c| − β·π_r/|y_r| − γ); γ is the margin to win by. 2405.14734
    "simpo": lambda mean_margin, beta, gamma=1.0: -logsigmoid(beta * mean_margin - gamma),
    # RPO's loss without a reference, of β(π_c − π_r). 2401.08417
    "cpo": _compute_rpo,
    # −p_c − β·log σ(log odds(p_c) − log odds(p_r)), p = π/|y| the mean log-prob, odds = e^p/(1 − e^p):
    # likelihood and odds ratio. β is the paper's λ and may be 0. 1 − e^p is computed without cancellation; a
    # mean log-prob above −1e-6 counts as −1e-6 in the odds, with no gradient there. `loss/nll` is the first
    # part, `log_odds/mean` the log of the odds ratio. 2403.07691
    "orpo": _compute_orpo,
}

WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
OF_MEANS = ("simpo", "orpo")  # whose metrics are of means over tokens
BETAS = {"simpo": 2.0}  # the default of all others is 0.1


def _make_loss(name: str, formula: Formula) -> PreferenceLoss:
    """The loss of a formula: a function of the fields of PairLogProbs that it needs, and its numbers."""
    taken = inspect.signature(formula).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    beta = inspect.Parameter("beta", kind, default=BETAS.get(name, 0.1))
    numbers = [beta, *(parameter for parameter in taken.values() if parameter.default is not beta.empty)]
    compares = name not in WITHOUT_REFERENCE
    fields = [field for field in PairLogProbs._fields if compares or "ref" not in field]
    signature = inspect.Signature([*(inspect.Parameter(field, kind) for field in fields), *numbers])

    def loss(*values: Tensor, **params: Any) -> LossOutput:
        given = bind_numbers(name, signature, *values, **params)
        check_one_per_pair(name, **{field: given[field] for field in fields})
        chosen, rejected = good, bad = given["chosen"], given["rejected"]
        if compares:
            good, bad = good - given["ref_chosen"].detach(), bad - given["ref_rejected"].detach()
        good_mean, bad_mean = good / given["chosen_lengths"], bad / given["rejected_lengths"]
        given |= {
            "good": good,
            "bad": bad,
            "margin": good - bad,
            "good_mean": good_mean,
            "bad_mean": bad_mean,
            "mean_margin": good_mean - bad_mean,
        }
        found = formula(**{argument: given[argument] for argument in taken})
        losses, more = (found, {}) if isinstance(found, Tensor) else found
        if name in OF_MEANS:
            chosen, rejected = good, bad = good_mean, bad_mean
        good, bad = given["beta"] * good, given["beta"] * bad
        metrics = {
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/margins": good - bad,
            "rewards/accuracies": good > bad,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            **more,
        }
        return sum_rows(spoil_losses(losses, good, bad), metrics)

    setattr(loss, "__signature__", signature)  # noqa: B010  (unknown to pyright)
    return loss


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    name: _make_loss(name, formula) for name, formula in TABLE.items()
}


# --- by name ------------------------------------------------------------------------------------------------

TRL_LOSS_TYPES = {
    "sigmoid": "dpo",
    "robust": "robust_dpo",
    "ipo": "averaged_ipo",  # TRL divides by the lengths
    "sigmoid_norm": "length_normalised_dpo",
    "exo_pair": "exo",
    "nca_pair": "nca",
    **{name: name for name in ("hinge", "sppo_hard", "apo_zero", "apo_down", "simpo")},
}
"""`loss_type` of TRL 1.16's trainers -> our name. Others of its have none."""


def resolve_preference_loss(name: str | PreferenceLoss) -> PreferenceLoss:
    """The loss of a key of PREFERENCE_LOSSES, or of module:function; a function is returned as it is.

    Raises ConfigError for another name, with the nearest key, or with ours where it is TRL's; PlugInError for
    a function that cannot be imported.
    """
    if not isinstance(name, str):
        return name
    if name in TRL_LOSS_TYPES.keys() - PREFERENCE_LOSSES.keys():
        ours = TRL_LOSS_TYPES[name]
        raise ConfigError(
            f"preference loss {name!r} is not known; did you mean {ours!r}? So is TRL's named here"
        )
    return find_function(
        "preference loss",
        name,
        PREFERENCE_LOSSES,
        takes="fields of rollouts.losses.preference_losses.PairLogProbs",
    )


def compute_preference_loss(pairs: PairLogProbs, loss: str | PreferenceLoss, **params: Any) -> LossOutput:
    """A loss of PREFERENCE_LOSSES, or your own function, on pairs: it is given the fields of PairLogProbs
    that it takes by name.

    Raises ConfigError if it needs a reference and the pairs have none, and for a parameter that it does not
    take.
    """
    function = resolve_preference_loss(loss)
    names = inspect.signature(function).parameters
    fields = {name: value for name, value in pairs._asdict().items() if name in names}
    for name, value in fields.items():
        require(
            value is not None, f"preference loss {loss!r} needs {name} and the pairs have none; score them"
        )
    check_keywords(f"preference loss {loss!r}", function, params, beside=fields)
    return function(**fields, **params)


# --- rows and pairs -----------------------------------------------------------------------------------------


def compute_pair_log_probs(inputs: LossInputs) -> PairLogProbs:
    """Pairs of a micro-batch in which row 2i holds the chosen and row 2i + 1 the rejected response of pair i:
    sums over each row's mask.

    Raises ValueError for an odd number of rows, and naming a row that trains no token: its sum would be 0,
    the log-prob of a certain event.
    """
    if len(inputs.mask) % 2:
        raise ValueError(f"the batch has {len(inputs.mask)} rows; pairs are chosen and rejected in turn")
    lengths = inputs.mask.sum(dim=-1)
    if empty := (lengths == 0).nonzero().flatten().tolist():
        raise ValueError(f"row {empty[0]} trains no token; leave it out, with the other row of its pair")
    inputs = clear_masked(inputs)
    sums, lengths = inputs.log_probs.sum(dim=-1), lengths.to(inputs.log_probs.dtype)
    ref = None if inputs.ref_log_probs is None else inputs.ref_log_probs.sum(dim=-1)
    return make_pairs(sums, ref, lengths)


def make_pairs(sums: Tensor, ref: Tensor | None, lengths: Tensor) -> PairLogProbs:
    """The pairs of rows [2P], chosen and rejected in turn."""
    halves = [None if row is None else row[side::2] for row in (sums, ref, lengths) for side in (0, 1)]
    return PairLogProbs(*halves)  # pyright: ignore[reportArgumentType]  (only ref may be None)


class LinearisedLoss(NamedTuple):
    """A loss of rows' log-probs at one point, and its slope as advantages."""

    output: LossOutput  # without gradient
    advantages: tuple[Tensor, ...]  # of the shapes of the log-probs given


def linearise_row_loss(loss: Callable[..., LossOutput], *row_log_probs: Tensor) -> LinearisedLoss:
    """The advantages with which the `reinforce` loss, −Σ A·lp over tokens, has exactly the gradient of
    `loss(*row_log_probs)` at these weights.

    A function of sums of log-probs has one and the same slope at every token of a row: A = −∂loss/∂(sum of
    the row). So a loss that needs several rows at once (a pair, a batch) trains with rows in different
    micro-batches, in any packing and on any rank: the sums come from one pass without gradient, and the
    loss's count is the constant denominator. What the loss raises rises.
    """
    points = [values.detach().requires_grad_() for values in row_log_probs]
    with torch.enable_grad():
        output = loss(*points)
    grads = torch.autograd.grad(output.sum, points, allow_unused=True, materialize_grads=True)
    return LinearisedLoss(output._replace(sum=output.sum.detach()), tuple(-grad for grad in grads))


def linearise_preference_loss(
    pairs: PairLogProbs, loss: str | PreferenceLoss, **params: Any
) -> LinearisedLoss:
    """`linearise_row_loss` of `compute_preference_loss`: the advantages of chosen and of rejected rows."""
    return linearise_row_loss(
        lambda chosen, rejected: compute_preference_loss(
            pairs._replace(chosen=chosen, rejected=rejected), loss, **params
        ),
        *pairs[:2],
    )


def check_one_per_pair(loss_name: str, **values: Tensor) -> None:
    """Raises ValueError unless all tensors are one-dimensional and of one length."""
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{loss_name}: {shapes}; all must be one-dimensional and of one length")


def spoil_losses(losses: Tensor, *values: Tensor) -> Tensor:
    """losses [P] with NaN, and NaN in the gradient of each of values [P], where one of these is not finite.

    For losses that make a harmless number of a log-prob of -inf, as a sigmoid and a hinge do.
    """
    for value in values:
        broken = ~value.isfinite()
        spoilt = torch.zeros_like(value).masked_fill(broken, torch.nan).detach()
        # a sum: the hinge keeps even a NaN from passing back through it
        losses = losses + spoilt * torch.where(broken, value, 0.0)
    return losses


# --- KTO ----------------------------------------------------------------------------------------------------


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
        desirable_weight + undesirable_weight > 0, "kto: both weights are 0; set desirable_weight above 0"
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
