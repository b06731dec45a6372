"""What every loss takes and returns. Axes: B rows of a micro-batch, T positions, right-padded."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

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


# What numbers may be, by the name of the keyword; where a loss differs, by the loss and the name. Log-ratios
# are held within ±20, ratios between 2.06e-9 and 4.85e8: a bound outside could never act.
LEAST_BOUND = 2.07e-9
RANGES = {
    name: interval
    for interval, names in {
        "(0, inf)": "beta clip cap importance_cap temperature clip_high tau_positive tau_negative"
        " gmpo.clip_low kl_low kl_high k_positive k_negative lambda_positive lambda_negative",
        "[0, inf)": "low ratio_low kl_coef mu_penalty_coef cov_kl_coef gamma nll_weight centring"
        " desirable_weight undesirable_weight dro.beta orpo.beta",
        "(0, 1]": "clip_low tv_low tv_high cov_fraction entropy_fraction policy_entropy_fraction",
        "[0, 1]": "divergence.beta",
        "(2.07e-9, 1)": "floor",
        "[0, 20)": "delta sequence_k1_mask.limit",
        "[0, 4.85e8)": "sequence_k3_mask.limit",
        "(1, inf)": "dual_clip",  # else every token with A < 0 has no gradient
        "[0, 0.5)": "label_smoothing",  # the share of labels believed wrong
        "(0, 0.5)": "exo.label_smoothing",
    }.items()
    for name in names.split()
}


def check_numbers(owner: str, **values: Any) -> None:
    """Raises ConfigError naming the first value outside its range; NaN is in none, None is not looked at."""
    for name, value in values.items():
        interval = RANGES.get(f"{owner}.{name}", RANGES.get(name))
        if interval and value is not None:
            low, high = map(float, interval[1:-1].split(","))
            ends = {low: "[" in interval, high: "]" in interval}
            inside = low < value < high or ends.get(value, False)
            require(inside, f"{owner}: {name}={value} is outside its range; choose a number in {interval}")
        if name in ("low", "ratio_low"):
            rule = f"{owner}: {name}={value} never acts; choose 0, no lower bound, or more than {LEAST_BOUND}"
            require(not 0 < (value or 0) < LEAST_BOUND, rule)
        upper = "cap" if "cap" in values else f"{name.removesuffix('low')}high"
        if name in ("low", "ratio_low", "cov_low") and upper in values:
            rule = f"{owner}: {name}={value}, {upper}={values[upper]}; the rule is {name} < {upper}"
            require(value < values[upper], rule)


def bind_numbers(owner: str, signature: inspect.Signature, *values: Any, **params: Any) -> dict[str, Any]:
    """The arguments of a loss by name, with its defaults. Raises ConfigError as check_numbers, TypeError for
    an argument that the loss does not take.
    """
    bound = signature.bind(*values, **params)
    bound.apply_defaults()
    check_numbers(owner, **bound.arguments)
    return bound.arguments


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
