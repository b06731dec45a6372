"""From per-token log-probs to those of whole responses. Axes: B rows, P pairs, T positions. All in nats."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollouts.losses.inputs import LossInputs, LossOutput, clear_masked


class RowLogProbs(NamedTuple):
    """Sums over the trained tokens of each row."""

    log_probs: Tensor  # [B] with gradient
    ref_log_probs: (
        Tensor | None
    )  # [B] of the frozen reference, without gradient; None: the batch was not scored by one
    lengths: Tensor  # [B] trained tokens, in the dtype of log_probs


class PairLogProbs(NamedTuple):
    """The same for pairs of responses to one prompt. The names are the arguments of the losses of
    rollouts.losses.preference_losses.
    """

    chosen: Tensor  # [P] with gradient: log-prob of the preferred response
    rejected: Tensor  # [P] with gradient
    ref_chosen: Tensor | None  # [P] of the frozen reference
    ref_rejected: Tensor | None  # [P]
    chosen_lengths: Tensor  # [P] tokens of the response, at least 1
    rejected_lengths: Tensor  # [P]


def compute_row_log_probs(inputs: LossInputs) -> RowLogProbs:
    """The log-prob of each row's response: the sum over its mask. What lies outside the mask never counts,
    NaN and -inf included.

    Raises ValueError naming a row whose mask is empty: its sum would be 0, the log-prob of a certain event.
    """
    lengths = inputs.mask.sum(dim=-1)
    empty = (lengths == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"row {empty[0]} trains no token, so its response has no log-prob; leave it out, with the other"
            " row of its pair"
        )
    inputs = clear_masked(inputs)
    log_probs = inputs.log_probs.sum(dim=-1)
    ref = None if inputs.ref_log_probs is None else inputs.ref_log_probs.sum(dim=-1)
    return RowLogProbs(log_probs, ref, lengths.to(log_probs.dtype))


def compute_pair_log_probs(inputs: LossInputs) -> PairLogProbs:
    """Pairs of a micro-batch in which row 2i holds the chosen and row 2i + 1 the rejected response of pair i.

    Raises ValueError for an odd number of rows and for a row that trains no token.
    """
    if len(inputs.mask) % 2:
        raise ValueError(
            f"the batch has {len(inputs.mask)} rows; pairs need an even number: chosen and rejected in turn"
        )
    rows = compute_row_log_probs(inputs)
    ref = rows.ref_log_probs
    return PairLogProbs(
        chosen=rows.log_probs[0::2],
        rejected=rows.log_probs[1::2],
        ref_chosen=None if ref is None else ref[0::2],
        ref_rejected=None if ref is None else ref[1::2],
        chosen_lengths=rows.lengths[0::2],
        rejected_lengths=rows.lengths[1::2],
    )


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


def check_one_per_pair(loss_name: str, **values: Tensor) -> None:
    """Raises ValueError unless all tensors are one-dimensional and of one length, naming those that differ."""
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(
            f"{loss_name}: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}; all must be [P],"
            " a value a pair"
        )


def spoil_losses(losses: Tensor, *values: Tensor) -> Tensor:
    """losses [P] with NaN, and NaN in the gradient of each of values [P], where one of these is not finite.

    For losses that make a harmless number of a log-prob of -inf, as a sigmoid and a hinge do.
    """
    for value in values:
        broken, zeros = ~value.isfinite(), torch.zeros_like(value)
        # a sum: the hinge keeps even a NaN from passing back through it
        losses = losses + torch.where(
            broken, torch.full_like(zeros, torch.nan), zeros
        ).detach() * torch.where(broken, value, zeros)
    return losses


def ones_like_mask(values: Tensor) -> Tensor:
    """A mask that keeps every one of `values`, for `collect_token_metrics`."""
    return torch.ones_like(values, dtype=torch.bool)
