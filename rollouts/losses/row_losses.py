"""Losses that need several rows at once, as functions of numpy arrays: sums or scores of rows in, the loss
and a slope for every row out.

    backend.forward ──► sums of log-probs [B] ──► RowLoss ──► LinearisedRows ──► advantages of `linear`,
                                                                                  its count the denominator

The arithmetic is float64. Every function here runs torch, on small tensors of the CPU: call it on the device
thread. Axes: B rows, P pairs; rows of a pair stand after each other, chosen first.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.errors import ConfigError, ModelError, require
from rollouts.losses.preference_losses import (
    PREFERENCE_LOSSES,
    LinearisedLoss,
    PreferenceLoss,
    compute_kto_reference_point,
    compute_kto_weights,
    kto_loss,
    linearise_preference_loss,
    linearise_row_loss,
    make_pairs,
    resolve_preference_loss,
)
from rollouts.losses.reward_model_losses import bradley_terry_loss, compute_pair_calibration
from rollouts.types import LossParams, Mean, Metric, Numbers, metric_values

Values = NDArray[np.float64]  # [B] or [P]

KTO = "kto"
REWARDS = ("rewards/chosen", "rewards/rejected")


class LinearisedRows(NamedTuple):
    """A loss of rows at one point, and its slope."""

    loss: float  # sum / count
    total: float  # the denominator: pairs, or labelled rows
    advantages: Values  # [B] −∂sum/∂(value of the row): what every trained token of the row gets
    metrics: dict[str, Metric]


RowLoss = Callable[..., LinearisedRows]
"""Made by the functions below, each of which says what it is called with."""


def make_pair_loss(name: str, params: LossParams) -> RowLoss:
    """`loss(log_probs [2P], *, ref_log_probs [2P] or None, lengths [2P])` of a loss on pairs: a key of
    PREFERENCE_LOSSES, or module:function.

    Raises ConfigError or PlugInError for a name that stands for no such loss. Its parameters are looked at by
    check_preference_loss.
    """
    _resolve(name)

    def loss(log_probs: Values, *, ref_log_probs: Values | None, lengths: Values) -> LinearisedRows:
        ref = None if ref_log_probs is None else _tensor(ref_log_probs)
        pairs = make_pairs(_tensor(log_probs), ref, _tensor(lengths))
        return _finish(linearise_preference_loss(pairs, name, **params))

    return loss


def make_kto_loss(params: LossParams, *, num_desirable: int, num_undesirable: int) -> RowLoss:
    """`loss(log_probs [B], *, ref_log_probs [B], desirable [B], others [B] or None, ref_others [B] or None)`
    of KTO.

    others are the mismatched rows, from which the reference point is estimated; with `reference_point` in
    params they are not read. Where params set neither weight, compute_kto_weights does, from the numbers of
    rows of the whole data. Raises ConfigError if one kind is missing then.
    """
    given = {"desirable_weight": 1.0, "undesirable_weight": 1.0, **params}
    weights = list(given)[:2]
    if not params.keys() & set(weights):
        try:
            given |= dict(zip(weights, compute_kto_weights(num_desirable, num_undesirable), strict=True))
        except ValueError as error:
            raise ConfigError(
                f"preference.loss='kto': {error}; set loss_params.desirable_weight and .undesirable_weight to"
                " train on one"
            ) from error

    def loss(
        log_probs: Values,
        *,
        ref_log_probs: Values,
        desirable: NDArray[np.bool_],
        others: Values | None,
        ref_others: Values | None,
    ) -> LinearisedRows:
        numbers = dict(given)
        if "reference_point" not in numbers:
            assert others is not None and ref_others is not None
            numbers["reference_point"] = compute_kto_reference_point(_tensor(others), _tensor(ref_others))
        ref, good = _tensor(ref_log_probs), torch.from_numpy(desirable)
        found = _finish(
            linearise_row_loss(lambda values: kto_loss(values, ref, good, **numbers), _tensor(log_probs))
        )
        found.metrics["kto/desirable/frac"] = Mean(float(desirable.sum()), float(len(desirable)))
        numbers = {f"kto/{name}": given[name] for name in weights}
        means = metric_values(found.metrics)
        if set(REWARDS) <= means.keys():
            numbers["rewards/margins"] = means[REWARDS[0]] - means[REWARDS[1]]
        found.metrics.update({name: Mean(float(value), 1.0) for name, value in numbers.items()})
        return found

    return loss


def make_score_loss(centring: float) -> RowLoss:
    """`loss(scores [2P], *, margins [P])` of a reward model: bradley_terry_loss with that centring."""

    def loss(scores: Values, *, margins: Values) -> LinearisedRows:
        of_scores = partial(bradley_terry_loss, margins=_tensor(margins), centring=centring)
        return _finish(linearise_row_loss(of_scores, _tensor(scores[0::2]), _tensor(scores[1::2])))

    return loss


def make_regression_loss(mean: float, std: float) -> RowLoss:
    """`loss(scores [B], *, margins [B])` of a reward model: the squared error of its scores against (margin −
    mean) / std.
    """

    def loss(scores: Values, *, margins: Values) -> LinearisedRows:
        gaps = scores - (margins - mean) / std
        return LinearisedRows(float(np.square(gaps).mean()), float(len(gaps)), -2 * gaps, {})

    return loss


def measure_regression(scores: Values, *, targets: Values) -> Numbers:
    """`mse` and, where both vary, Pearson's `correlation` of scores [B] with their targets [B]. Raises
    ModelError for a score that is not finite.
    """
    if not np.isfinite(scores).all():
        raise ModelError("a score of the reward model is not finite; go on from an earlier checkpoint")
    found = {"mse": float(np.square(scores - targets).mean())}
    if scores.std() * targets.std() > 0:
        found["correlation"] = float(np.corrcoef(scores, targets)[0, 1])
    return found


def measure_calibration(scores: Values) -> Numbers:
    """Accuracy, expected calibration error (`ece`), `brier` score and `nll` of compute_pair_calibration, from
    scores [2P].

    Raises ModelError if there is no pair or a score is not finite: the weights are damaged then.
    """
    try:
        found = compute_pair_calibration(_tensor(scores[0::2]), _tensor(scores[1::2]))
    except ValueError as error:
        raise ModelError(
            f"the scores of the reward model cannot be measured: {error}; go on from an earlier checkpoint,"
            " with a lower lr"
        ) from error
    return {
        "accuracy": found.accuracy,
        "ece": found.expected_calibration_error,
        "brier": found.brier,
        "nll": found.nll,
    }


def compares_with_reference(name: str) -> bool:
    """Whether the loss takes the log-probs of a reference model. Raises as check_preference_loss."""
    references = {"ref_chosen", "ref_rejected"}
    return name == KTO or bool(references & inspect.signature(_resolve(name)).parameters.keys())


def check_preference_loss(name: str, params: LossParams) -> None:
    """Raises ConfigError if there is no such loss, or it does not take these parameters; PlugInError for a
    function that cannot be imported. A function of the user is not called.
    """
    pair = np.full(2, -1.0)
    try:
        if name == KTO:
            loss = make_kto_loss({"reference_point": 0.0, **params}, num_desirable=1, num_undesirable=1)
            loss(pair, ref_log_probs=pair, desirable=pair < [0, -1], others=None, ref_others=None)
        elif _resolve(name) in PREFERENCE_LOSSES.values():
            make_pair_loss(name, params)(pair, ref_log_probs=pair, lengths=-pair)
    except TypeError as error:
        raise ConfigError(
            f"preference.loss_params={dict(params)} are not what the loss takes: {error}"
        ) from error


def _resolve(name: str) -> PreferenceLoss:
    require(
        name != "apo_zero_unpaired",
        "preference.loss='apo_zero_unpaired' of TRL is 'kto' with loss_params = { reference_point = 0 }",
    )
    try:
        return resolve_preference_loss(name)
    except ConfigError as error:
        raise ConfigError(f"preference.loss: {error}, of pairs; or 'kto', of labelled responses") from error


def _finish(found: LinearisedLoss) -> LinearisedRows:
    """One advantage per row, in the rows' order."""
    total, count, metrics = found.output
    advantages = torch.stack(found.advantages, dim=-1).flatten().numpy()
    return LinearisedRows(float(total) / count, count, advantages, metrics)


def _tensor(values: Values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
