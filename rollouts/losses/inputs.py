"""What every loss takes and returns. Axes: B rows of a micro-batch, T positions, right-padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rollouts.errors import ConfigError
from rollouts.types import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token values of one micro-batch, all [B, T]. What lies outside the mask is garbage, perhaps NaN."""

    # with gradient: the policy's log-prob of each token, nats; a scalar head's value before the token
    log_probs: Tensor
    mask: Tensor  # bool: True where the token trains
    entropy: Tensor | None = None  # nats; with gradient only for a loss with an entropy_coef. None: no policy
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None  # nats: the trainer's own, before the first update on the batch
    rollout_log_probs: Tensor | None = None  # nats: mu, of the distribution that the engine sampled from
    ref_log_probs: Tensor | None = None  # nats: the frozen reference's
    returns: Tensor | None = None  # in the reward's unit: targets of the values
    old_values: Tensor | None = None  # the critic's own, before the first update on the batch
    note_weights: Callable[[Tensor], None] | None = None  # gets the weights [B, T] of a correction

    def need(self, name: str) -> Tensor:
        """A field. Raises ConfigError where the batch lacks it."""
        values = getattr(self, name)
        require(
            values is not None,
            f"the loss needs {name} and the batch has none; fill RolloutBatch.{name}",
        )
        return values

    def need_old(self) -> Tensor:
        """What a ratio is taken against: recomputed log-probs, or mu. Raises ConfigError without."""
        return self.need("rollout_log_probs") if self.old_log_probs is None else self.old_log_probs


class LossOutput(NamedTuple):
    """A sum and what it sums over. The backend divides by the whole batch's count, not the micro-batch's."""

    sum: Tensor  # scalar with gradient
    # of the loss's unit; must equal what the masks say
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    metrics: dict[str, Metric]


LossFn = Callable[..., LossOutput]
"""Called as `loss(inputs, unit=spec.unit, **spec.params)`."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_range(interval: str, **values: float) -> None:
    """Raises ConfigError naming the first value outside an interval such as "(0, 1]"; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    for name, value in values.items():
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        require(above and below, f"{name}={value} is outside its range; choose a number in {interval}")


def clear_masked(inputs: LossInputs) -> LossInputs:
    """The same inputs with 0 outside the mask, all but log_probs and entropy detached.

    Must run before any arithmetic: a NaN times a mask of 0 is NaN, and so is its gradient. Raises ValueError
    if a field is not of the mask's shape.
    """
    cleared: dict[str, Tensor] = {}
    for name in (field.name for field in fields(inputs)):
        values = getattr(inputs, name)
        if isinstance(values, Tensor) and name != "mask":
            if values.shape != inputs.mask.shape:
                raise ValueError(
                    f"LossInputs.{name} has shape {tuple(values.shape)}; it must be that of the mask,"
                    f" {tuple(inputs.mask.shape)}"
                )
            kept = values if name in ("log_probs", "entropy") else values.detach()
            cleared[name] = torch.where(inputs.mask, kept, 0.0)
    return replace(inputs, **cleared)
