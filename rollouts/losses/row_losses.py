"""Losses that need several rows at once, as functions of numpy arrays: sums or scores of rows in, the loss
and a slope for every row out.

    backend.forward ──► sums of log-probs [B] ──► RowLoss ──► LinearisedRows ──► advantages of `reinforce`, the count its denominator

The arithmetic is float64. Every function here runs torch, on small tensors of the CPU: call it on the device
thread. Axes: B rows, P pairs; rows of a pair stand after each other, chosen first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollouts.errors import ConfigError, ModelError
from rollouts.losses.inputs import LossOutput
from rollouts.losses.kto_loss import compute_kto_reference_point, compute_kto_weights, kto_loss
from rollouts.losses.plug_ins import import_function
from rollouts.losses.preference_losses import (
    PreferenceLoss,
    linearise_preference_loss,
    resolve_preference_loss,
)
from rollouts.losses.preference_pairs import LinearisedLoss, PairLogProbs, linearise_row_loss
from rollouts.losses.reward_model_losses import bradley_terry_loss, compute_pair_calibration
from rollouts.types import Mean, Metric

Values = NDArray[np.float64]  # [B] or [P]
Params = Mapping[str, float | int | bool | str]

KTO = "kto"
KTO_WEIGHTS = ("desirable_weight", "undesirable_weight")


class LinearisedRows(NamedTuple):
    """A loss of rows at one point, and its slope."""

    loss: float  # sum / count
    total: float  # the denominator: pairs, or labelled rows
    advantages: Values  # [B] −∂sum/∂(value of the row): what every trained token of the row gets
    metrics: dict[str, Metric]


RowLoss = Callable[..., LinearisedRows]
"""Made by the functions below, each of which says what it is called with."""


def make_preference_loss(
    name: str, params: Params, *, num_desirable: int = 0, num_undesirable: int = 0
) -> RowLoss:
    """make_kto_loss if `name` is "kto", which alone reads the numbers of rows, otherwise make_pair_loss.
    Raises what these raise.
    """
    if name == KTO:
        return make_kto_loss(params, num_desirable=num_desirable, num_undesirable=num_undesirable)
    return make_pair_loss(name, params)


def make_pair_loss(name: str, params: Params) -> RowLoss:
    """`loss(log_probs [2P], *, ref_log_probs [2P] or None, lengths [2P])` of a loss on pairs: a key of
    PREFERENCE_LOSSES, or module:function.

    Raises ConfigError or PlugInError for a name that stands for no such loss. Its parameters are looked at by
    check_preference_loss.
    """
    function = _resolve(name)
    return partial(_linearise_pairs, function if ":" in name else name, dict(params))


def make_kto_loss(params: Params, *, num_desirable: int, num_undesirable: int) -> RowLoss:
    """`loss(log_probs [B], *, ref_log_probs [B], desirable [B], others [B] or None, ref_others [B] or None)`
    of KTO.

    others are the mismatched rows, from which the reference point is estimated; with `reference_point` in
    params they are not read. Where params set neither weight, compute_kto_weights does, from the numbers of
    rows of the whole data. Raises ConfigError if one kind is missing then.
    """
    given = dict(params)
    if not any(name in given for name in KTO_WEIGHTS):
        try:
            given |= dict(zip(KTO_WEIGHTS, compute_kto_weights(num_desirable, num_undesirable), strict=True))
        except ValueError as error:
            raise ConfigError(
                f"preference.loss='kto': {error}; set loss_params.desirable_weight and .undesirable_weight to"
                " train on one"
            ) from error
    return partial(_linearise_labelled, given)


def make_score_loss(centring: float) -> RowLoss:
    """`loss(scores [2P], *, margins [P])` of a reward model: bradley_terry_loss with that centring."""
    return partial(_linearise_scores, centring)


def measure_calibration(scores: Values) -> dict[str, float]:
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


def check_preference_loss(name: str, params: Params, *, reference: bool) -> None:
    """Raises ConfigError if there is no such loss, it does not take these parameters, or it needs a reference
    and there is none, or has one for nothing; PlugInError for a function that cannot be imported. A function
    of the user is not called.
    """
    if name == KTO:
        _require_reference(name, needed=True, given=reference)
        _try(
            partial(_linearise_labelled, dict(params)),
            params,
            desirable=np.asarray([True, False]),
            others=None,
            ref_others=None,
        )
        return
    function = _resolve(name)
    names = inspect.signature(function).parameters
    _require_reference(name, needed="ref_chosen" in names or "ref_rejected" in names, given=reference)
    if ":" not in name:
        _try(partial(_linearise_pairs, name, dict(params)), params, lengths=np.ones(2))


def _try(loss: RowLoss, params: Params, **rows: object) -> None:
    try:
        loss(np.full(2, -1.0), ref_log_probs=np.full(2, -1.0), **rows)
    except TypeError as error:
        raise ConfigError(
            f"preference.loss_params={dict(params)} are not what the loss takes: {error}"
        ) from error


def _require_reference(name: str, *, needed: bool, given: bool) -> None:
    if needed and not given:
        raise ConfigError(
            f"preference.loss={name!r} compares with a reference model; set preference.reference ="
            ' "precomputed" or "live"'
        )
    if given and not needed:
        raise ConfigError(
            f'preference.loss={name!r} compares with no reference model; set preference.reference = "none"'
        )


def _resolve(name: str) -> PreferenceLoss:
    if ":" in name:
        return import_function(
            "preference.loss", name, "chosen, rejected, … as those of rollouts.losses.preference_losses"
        )
    if name == "apo_zero_unpaired":
        raise ConfigError(
            "preference.loss='apo_zero_unpaired' of TRL is 'kto' with loss_params = { reference_point = 0 }"
        )
    try:
        return resolve_preference_loss(name)
    except ConfigError as error:
        raise ConfigError(
            f"preference.loss: {error} of pairs as module:function; or 'kto', of labelled responses"
        ) from error


# --- at one point -------------------------------------------------------------------------------------------


def _linearise_pairs(
    loss: str | PreferenceLoss,
    params: Params,
    log_probs: Values,
    *,
    ref_log_probs: Values | None,
    lengths: Values,
) -> LinearisedRows:
    values, lengths_of = _tensor(log_probs), _tensor(lengths)
    ref = None if ref_log_probs is None else _tensor(ref_log_probs)
    pairs = PairLogProbs(
        chosen=values[0::2],
        rejected=values[1::2],
        ref_chosen=None if ref is None else ref[0::2],
        ref_rejected=None if ref is None else ref[1::2],
        chosen_lengths=lengths_of[0::2],
        rejected_lengths=lengths_of[1::2],
    )
    return _finish(linearise_preference_loss(pairs, loss, **params))  # pyright: ignore[reportArgumentType]  (a loss of the user may take text)


def _linearise_labelled(
    params: Params,
    log_probs: Values,
    *,
    ref_log_probs: Values,
    desirable: NDArray[np.bool_],
    others: Values | None,
    ref_others: Values | None,
) -> LinearisedRows:
    numbers = dict(params)
    if "reference_point" not in numbers:
        if others is None or ref_others is None:
            numbers["reference_point"] = 0.0  # of a try
        else:
            numbers["reference_point"] = float(
                compute_kto_reference_point(_tensor(others), _tensor(ref_others))
            )
    good = torch.from_numpy(desirable)
    ref = _tensor(ref_log_probs)

    def of_sums(values: Tensor) -> LossOutput:
        return kto_loss(values, ref, good, **numbers)  # pyright: ignore[reportArgumentType]  (a parameter of another type is refused by name)

    found = _finish(linearise_row_loss(of_sums, _tensor(log_probs)))
    chosen, rejected = found.metrics.get("rewards/chosen"), found.metrics.get("rewards/rejected")
    more: dict[str, Metric] = {}
    if (
        isinstance(chosen, Mean)
        and isinstance(rejected, Mean)
        and chosen.value is not None
        and rejected.value is not None
    ):
        more["rewards/margins"] = Mean(chosen.value - rejected.value, 1.0)
    more["kto/desirable/frac"] = Mean(float(desirable.sum()), float(len(desirable)))
    more |= {f"kto/{name}": Mean(float(numbers.get(name, 1.0)), 1.0) for name in KTO_WEIGHTS}
    return found._replace(metrics={**found.metrics, **more})


def _linearise_scores(centring: float, scores: Values, *, margins: Values) -> LinearisedRows:
    values, margin = _tensor(scores), _tensor(margins)

    def of_scores(chosen: Tensor, rejected: Tensor) -> LossOutput:
        return bradley_terry_loss(chosen, rejected, margins=margin, centring=centring)

    return _finish(linearise_row_loss(of_scores, values[0::2], values[1::2]))


def _finish(found: LinearisedLoss) -> LinearisedRows:
    """One advantage per row, in the rows' order."""
    advantages = torch.stack(found.advantages, dim=-1).flatten().numpy()
    return LinearisedRows(
        float(found.output.sum) / found.output.count, found.output.count, advantages, found.output.metrics
    )


def _tensor(values: Values) -> Tensor:
    return torch.from_numpy(np.array(values, np.float64))
