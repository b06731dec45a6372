"""What every loss takes and returns. Axes: B rows of a micro-batch, T positions, right-padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.types import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token values of one micro-batch, all [B, T]. What lies outside the mask is garbage, NaN included."""

    # [B, T] with gradient: the policy's log-prob of each token, nats; of a model with a scalar head: its
    # value before the token
    log_probs: Tensor
    mask: Tensor  # [B, T] bool: True where the token trains
    entropy: Tensor | None = (
        # [B, T] nats, of the policy's distribution; with gradient only for a loss with an entropy_coef. None:
        # no policy
        None
    )
    advantages: Tensor | None = None  # [B, T]
    old_log_probs: Tensor | None = (
        None  # [B, T] nats: the trainer's own, recomputed before the first update on the batch
    )
    rollout_log_probs: Tensor | None = (
        None  # [B, T] nats: mu, of the distribution that the engine sampled from
    )
    ref_log_probs: Tensor | None = None  # [B, T] nats: the frozen reference's
    returns: Tensor | None = None  # [B, T] in the reward's unit: what the values are to become
    old_values: Tensor | None = None  # [B, T] the critic's own, before the first update on the batch
    note_weights: Callable[[Tensor], None] | None = (
        None  # is told the weights [B, T] of a correction, where the loss has one
    )


class LossOutput(NamedTuple):
    """A sum and what it sums over. The backend divides by the count of the whole batch, never by that of a
    micro-batch.
    """

    sum: Tensor  # scalar with gradient
    count: float  # of the loss's unit; must equal what the masks say  # pyright: ignore[reportIncompatibleMethodOverride]
    metrics: dict[str, Metric]


LossFn = Callable[..., LossOutput]
"""Called as `loss(inputs, unit=spec.unit, **spec.params)`."""


def clear_masked(inputs: LossInputs) -> LossInputs:
    """The same inputs with 0 at every position outside the mask, so that no garbage reaches a value or a
    gradient.

    Must run before any arithmetic: multiplying a NaN by a mask of 0 gives NaN, and its gradient NaN as well.
    Raises ValueError if a field is not of the mask's shape.
    """

    def clear(name: str, values: Tensor) -> Tensor:
        if values.shape != inputs.mask.shape:
            raise ValueError(
                f"LossInputs.{name} has shape {tuple(values.shape)}; it must be that of the mask,"
                f" {tuple(inputs.mask.shape)}"
            )
        return torch.where(inputs.mask, values, torch.zeros_like(values))

    def constant(name: str, values: Tensor | None) -> Tensor | None:
        return None if values is None else clear(name, values.detach())

    return LossInputs(
        log_probs=clear("log_probs", inputs.log_probs),
        mask=inputs.mask,
        entropy=None if inputs.entropy is None else clear("entropy", inputs.entropy),
        advantages=constant("advantages", inputs.advantages),
        old_log_probs=constant("old_log_probs", inputs.old_log_probs),
        rollout_log_probs=constant("rollout_log_probs", inputs.rollout_log_probs),
        ref_log_probs=constant("ref_log_probs", inputs.ref_log_probs),
        returns=constant("returns", inputs.returns),
        old_values=constant("old_values", inputs.old_values),
        note_weights=inputs.note_weights,
    )


def need_advantages(inputs: LossInputs, loss_name: str) -> Tensor:
    """The advantages [B, T]. Raises ConfigError when the batch has none."""
    if inputs.advantages is None:
        raise ConfigError(
            f"loss {loss_name!r} needs advantages and the batch has none; fill RolloutBatch.advantages, or"
            " use loss 'sft'"
        )
    return inputs.advantages


def need_rollout_log_probs(inputs: LossInputs, loss_name: str) -> Tensor:
    """mu [B, T]. Raises ConfigError when the batch has none."""
    if inputs.rollout_log_probs is None:
        raise ConfigError(
            f"loss {loss_name!r} needs the engine's log-probs and the batch has none; fill"
            " RolloutBatch.rollout_log_probs"
        )
    return inputs.rollout_log_probs


def choose_old_log_probs(inputs: LossInputs, loss_name: str) -> Tensor:
    """What the ratio is taken against, [B, T]: the trainer's recomputed log-probs if given, else mu. Raises
    ConfigError without either.
    """
    if inputs.old_log_probs is not None:
        return inputs.old_log_probs
    if inputs.rollout_log_probs is not None:
        return inputs.rollout_log_probs
    raise ConfigError(
        f"loss {loss_name!r} needs log-probs to compare with and the batch has none; fill rollout_log_probs"
        " or old_log_probs"
    )
