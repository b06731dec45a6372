"""What every loss takes and returns. Axes: B rows of a micro-batch, T positions, right-padded.

Also functions that are found by their names; ratios from log-probs; and from per-token values to a sum with
its count, and to metrics that merge.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollouts.errors import ConfigError, PlugInError, require
from rollouts.types import EffectiveShare, Fields, Function, Max, Mean, Metric, Min, record


@record
class LossInputs:
    """Per-token values of one micro-batch, all [B, T]. What lies outside the mask is garbage, perhaps NaN."""

    # with gradient: the policy's log-prob of each token, nats; a scalar head's value before the token
    log_probs: Tensor
    mask: Tensor  # bool: True where the token trains
    entropy: Tensor | None = None  # nats; with gradient only for a loss with an entropy_coef. None: no policy
    exact_kl: Tensor | None = None  # nats, with gradient: KL(reference || policy) before the token
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None  # nats: the trainer's own, before the first update on the batch
    rollout_log_probs: Tensor | None = None  # nats: mu, of the distribution that the engine sampled from
    ref_log_probs: Tensor | None = None  # nats: the frozen reference's
    returns: Tensor | None = None  # in the reward's unit: targets of the values
    old_values: Tensor | None = None  # the critic's own, before the first update on the batch
    # how many tokens train in the row's trajectory, of which the row is one segment; None: every row is one
    trajectory_tokens: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # what else the batch has, by its own names
    note_weights: Callable[[Tensor], None] | None = None  # gets the weights [B, T] of a correction

    def need(self, name: str) -> Tensor:
        """A field. Raises ConfigError where the batch lacks it."""
        values = getattr(self, name)
        require(values is not None, f"the loss needs {name} and the batch has none; fill RolloutBatch.{name}")
        return values

    @property
    def mu(self) -> Tensor:
        """The engine's log-probs. Raises ConfigError where the batch lacks them."""
        return self.need("rollout_log_probs")

    def need_old(self) -> Tensor:
        """What a ratio is taken against: recomputed log-probs, or mu. Raises ConfigError without."""
        return self.mu if self.old_log_probs is None else self.old_log_probs


class LossOutput(NamedTuple):
    """A sum and what it sums over. The backend divides by the whole batch's count, not the micro-batch's."""

    sum: Tensor  # scalar with gradient
    # of the loss's unit; must equal what the masks say
    count: float  # pyright: ignore[reportIncompatibleMethodOverride]
    metrics: dict[str, Metric]


LossFn = Callable[..., LossOutput]
"""Called as `loss(inputs, unit=spec.unit, **spec.params)`."""


def find_function(setting: str, name: str, known: Mapping[str, Function], *, takes: str) -> Function:
    """The function that `name`, a key of `known` or module:function, stands for. `takes` are its arguments in
    words.

    Raises ConfigError naming the nearest key when the name is unknown, PlugInError when it cannot be imported
    (a file, too) and when it is no function.
    """
    if name in known:
        return known[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"{setting}={name!r} is not known; did you mean {nearest!r}? Known: {', '.join(known)}, or"
            " module:function"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlugInError(
            f"{setting}={name!r} cannot be imported ({error}); write module:function, so that every worker"
            " can import it, and put the directory of the module's file on PYTHONPATH"
        ) from error
    if not callable(function):
        raise PlugInError(
            f"{setting}={name!r} is a {type(function).__name__}; it must be a function of {takes}"
        )
    return function


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


def bind_numbers(owner: str, signature: inspect.Signature, *values: Any, **params: Any) -> Fields:
    """The arguments of a loss by name, with its defaults. Raises ConfigError as check_numbers, TypeError for
    an argument that the loss does not take.
    """
    bound = signature.bind(*values, **params)
    bound.apply_defaults()
    check_numbers(owner, **bound.arguments)
    return bound.arguments


def clear_masked(inputs: LossInputs) -> LossInputs:
    """The same inputs with 0 outside the mask, all but log_probs, entropy and exact_kl detached.

    Must run before any arithmetic: a NaN times a mask of 0 is NaN, and so is its gradient. Raises ValueError
    if a field is not of the mask's shape.
    """

    def clear(name: str, values: Tensor) -> Tensor:
        if values.shape != inputs.mask.shape:
            raise ValueError(
                f"LossInputs.{name} has shape {tuple(values.shape)}; it must be that of the mask,"
                f" {tuple(inputs.mask.shape)}"
            )
        kept = values if name in ("log_probs", "entropy", "exact_kl") else values.detach()
        return torch.where(inputs.mask, kept, 0.0)

    named = {one.name: getattr(inputs, one.name) for one in fields(inputs) if one.name != "mask"}
    cleared = {name: clear(name, values) for name, values in named.items() if isinstance(values, Tensor)}
    extras = {name: clear(f"extras[{name!r}]", values) for name, values in inputs.extras.items()}
    return replace(inputs, extras=extras, **cleared)


# --- ratios and sums ----------------------------------------------------------------------------------------


MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8 is far outside every clip, and its square is finite in float32


def compute_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log_probs − old_log_probs, [B, T] nats, held within ±20. A NaN stays a NaN.

    Outside that range the gradient is 0: exp would overflow, and an infinite ratio has a NaN gradient even
    where a clip discards it (0 · inf).
    """
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_token_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs − old_log_probs), [B, T], between e^−20 and e^20."""
    return torch.exp(compute_log_ratio(log_probs, old_log_probs))


def compute_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] mean over a row's trained tokens of values [B, T]; a row without any gives 0."""
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def compute_row_sum(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] sum over a row's trained tokens of log-ratios [B, T], held within ±20."""
    return torch.where(mask, log_ratios, 0.0).sum(-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_sequence_ratio(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """[B, 1] geometric mean of a row's token ratios, of their logs [B, T]; 1 for a row without trained
    tokens. GSPO, 2507.18071.
    """
    return torch.exp(compute_row_mean(log_ratios, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def reduce_loss(
    token_losses: Tensor, mask: Tensor, unit: str, trajectory_tokens: Tensor | None = None
) -> tuple[Tensor, float]:
    """(sum, count) of losses [B, T] over the masked tokens, in the loss's unit.

    tokens, constant: sum over tokens; count is the number of tokens. (For "constant" the backend divides by
    the constant instead.) sequences: sum over rows of the mean over the row's tokens; count is the number of
    rows that have a token. sequence_sums: sum over tokens, count as for sequences. An empty mask gives 0 with
    a zero gradient, and 0. What lies outside the mask never counts. Raises ConfigError on another unit.

    With trajectory_tokens [B, T] of the inputs a row is a segment of a trajectory: each of its tokens is 1 /
    trajectory_tokens of it, in the mean and in the count. Segments add up to one trajectory, also over
    micro-batches, and to what it would give in one row.
    """
    kept = torch.where(mask, token_losses, 0.0)
    lengths = mask.sum(dim=-1)
    if unit in ("tokens", "constant"):
        return kept.sum(), float(lengths.sum())
    require(
        unit in ("sequences", "sequence_sums"),
        f"unit={unit!r} is not known; use 'tokens', 'sequences', 'sequence_sums' or 'constant'",
    )
    count = float((lengths > 0).sum())
    means = compute_row_mean(token_losses, mask)
    if trajectory_tokens is not None:
        tokens = torch.where(mask, trajectory_tokens, 1.0)
        count, means = float((mask / tokens.double()).sum()), kept / tokens
    return (kept if unit == "sequence_sums" else means).sum(), count


def select_top_fraction(values: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """[B, T] bool: of each row's n masked tokens the ⌈fraction · n⌉ largest; of equal ones the earlier."""
    order = torch.where(mask, values.detach(), -torch.inf).argsort(dim=-1, descending=True, stable=True)
    kept = torch.ceil(fraction * mask.sum(dim=-1, keepdim=True).double() - 1e-9)
    return (order.argsort(dim=-1) < kept) & mask


def collect_token_metrics(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """Metrics over the masked tokens of values, each of the mask's shape, by name; empty when the mask is
    empty. What is taken of the tokens is the last part of the name: max, min, ess (the effective sample size
    of weights), else their mean.

    All numbers are read back in one transfer: on an accelerator each transfer stalls the queue.
    """
    kept = mask.flatten().nonzero().squeeze(-1)
    count = float(len(kept))
    if not count or not values:
        return {}
    columns = torch.stack([column.detach().flatten()[kept].double() for column in values.values()])
    statistics = columns.sum(-1), columns.square().sum(-1), columns.amax(-1), columns.amin(-1)
    metrics = {}
    for name, (total, squares, top, low) in zip(values, torch.stack(statistics, -1).tolist(), strict=True):
        special = {"max": Max(top), "min": Min(low), "ess": EffectiveShare(total, squares, count)}
        metrics[name] = special.get(name.rpartition("/")[2], Mean(total, count))
    return metrics


def sum_tokens(losses: Tensor, inputs: LossInputs, unit: str, values: Mapping[str, Tensor]) -> LossOutput:
    """What reduce_loss makes of the losses of tokens [B, T], and metrics of values [B, T]."""
    sums = reduce_loss(losses, inputs.mask, unit, inputs.trajectory_tokens)
    return LossOutput(*sums, collect_token_metrics(values, inputs.mask))


def sum_rows(losses: Tensor, values: Mapping[str, Tensor]) -> LossOutput:
    """The sum of the losses of rows or pairs [P], their number, and metrics of values [P]."""
    everywhere = torch.ones_like(losses, dtype=torch.bool)
    return LossOutput(losses.sum(), float(len(losses)), collect_token_metrics(values, everywhere))
