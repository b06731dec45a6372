"""The losses of Tinker's API: sums over all positions of all datums. lp = log π(target) with gradient, q =
`logprobs`, A = `advantages`, r = exp(lp − q), held between e^−20 and e^20.

Where A is 0 a position adds exactly nothing, whatever its lp (see dro): prompts have A = 0 and any target.
Bounds are of the ratio itself, not of its distance from 1; inputs of their names are each position's own.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollouts.errors import ServiceRefused
from rollouts.losses.inputs import (
    MAX_LOG_RATIO,
    LossInputs,
    LossOutput,
    clear_masked,
    compute_row_mean,
    compute_token_ratio,
    sum_tokens,
)
from rollouts.types import LossSpec, LossUnit, Numbers

if TYPE_CHECKING:
    from rollouts.serve.wire import TrainRequest

LOW, HIGH, SEQUENCE = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"
POLICY = ("logprobs", "advantages")
HIDDEN = ("stable_reinforce", "custom")  # the one has no public formula, the other is code of the client's


class TinkerLoss(NamedTuple):
    """What a request for a loss must and may have."""

    inputs: tuple[str, ...]  # beside target_tokens
    settings: Numbers = {}  # and their defaults; each is 0 or above. Bounds may be inputs, too


TINKER_LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(()),
    "importance_sampling": TinkerLoss(POLICY),
    "ppo": TinkerLoss(POLICY, {LOW: 0.8, HIGH: 1.2}),
    "cispo": TinkerLoss(POLICY, {LOW: 0.0, HIGH: 4.0}),
    "dro": TinkerLoss(POLICY, {"beta": 0.05}),
    "gspo": TinkerLoss((*POLICY, SEQUENCE), {LOW: 0.8, HIGH: 1.2}),
}


class ChosenLoss(NamedTuple):
    """How the backend computes it."""

    spec: LossSpec
    weights: str  # the input that multiplies each position: A of the formulas


def choose_loss(request: "TrainRequest") -> ChosenLoss:
    """The loss of a request. Raises ServiceRefused for one that is not known, for settings that it does not
    have, and for inputs that are missing or not those of the first datum.
    """
    name = request.loss
    loss = TINKER_LOSSES.get(name)
    if loss is None:
        why = "is not offered here" if name in HIDDEN else "is not known"
        raise ServiceRefused(f"loss_fn={name!r} {why}; there is {', '.join(TINKER_LOSSES)}")
    settings = dict(loss.settings)
    for key, value in request.settings.items():
        if key not in loss.settings:
            has = ", ".join(loss.settings) or "none"
            raise ServiceRefused(f"loss_fn_config of {name!r} has {key!r}; its settings are: {has}")
        if isinstance(value, str) or not 0 <= value < float("inf"):
            raise ServiceRefused(f"loss_fn_config[{key!r}]={value!r}; it must be a number, 0 or above")
        settings[key] = value
    if settings.get(LOW, 0.0) > settings.get(HIGH, 0.0):
        raise ServiceRefused(f"loss_fn_config has {LOW}={settings[LOW]} above {HIGH}={settings[HIGH]}")
    read = {*loss.inputs, *loss.settings}
    for index, datum in enumerate(request.data):
        where = f"data[{index}].loss_fn_inputs"
        for key in loss.inputs:
            if key not in datum.inputs:
                raise ServiceRefused(f"{where} lacks {key!r}, which {name!r} needs")
        if not loss.inputs:  # each target has its weight, or 1
            continue
        if datum.inputs["target_tokens"].ndim > 1:
            raise ServiceRefused(f"{where}: several targets for a token are for cross_entropy alone")
        if apart := read & (datum.inputs.keys() ^ request.data[0].inputs.keys()):
            raise ServiceRefused(f"{where} and those of data[0] differ in {min(apart)!r}: all datums or none")
    spec = LossSpec(f"{__name__}:{name}", settings, unit="constant", constant=1.0, per_token=True)
    return ChosenLoss(spec, "advantages" if loss.inputs else "weights")


# --- formulas -----------------------------------------------------------------------------------------------


def cross_entropy(inputs: LossInputs, *, unit: LossUnit) -> LossOutput:
    """−A·lp, A = `weights` of any sign."""
    inputs = clear_masked(inputs)
    weights = inputs.need("advantages")
    return sum_tokens(-weights * torch.where(weights == 0, 0.0, inputs.log_probs), inputs, unit, {})


class Given(NamedTuple):
    """What a formula reads, all [B, T]; 0 outside the mask."""

    lp: Tensor  # q where A is 0, and without gradient there
    q: Tensor
    advantages: Tensor
    ratio: Tensor  # 1 where A is 0
    low: Tensor
    high: Tensor
    inputs: LossInputs

    def clip(self, ratio: Tensor) -> Tensor:
        """−min(ratio·A, clip(ratio, low, high)·A)."""
        above = self.advantages > 0
        bound = torch.where(above, self.high, torch.minimum(self.low, self.high))
        beyond = torch.where(above, ratio > bound, ratio < bound)
        return -self.advantages * torch.where(beyond, bound, ratio)


def _loss(formula: Callable[..., Tensor]) -> Callable[..., LossOutput]:
    @functools.wraps(formula)
    def loss(inputs: LossInputs, *, unit: LossUnit, **settings: float) -> LossOutput:
        inputs = clear_masked(inputs)
        q, advantages = inputs.mu, inputs.need("advantages")
        lp = torch.where(advantages == 0, q, inputs.log_probs)
        numbers = [torch.full_like(q, settings.pop(name, 1.0)) for name in (LOW, HIGH)]
        low, high = map(inputs.extras.get, (LOW, HIGH), numbers)
        given = Given(lp, q, advantages, compute_token_ratio(lp, q), low, high, inputs)
        return sum_tokens(formula(given, **settings), inputs, unit, {})

    return loss


@_loss
def importance_sampling(given: Given) -> Tensor:
    """−r·A."""
    return -given.advantages * given.ratio


@_loss
def ppo(given: Given) -> Tensor:
    """−min(r·A, clip(r, low, high)·A); gradient 0 where the clip counts."""
    return given.clip(given.ratio)


@_loss
def cispo(given: Given) -> Tensor:
    """−sg(clip(r, low, high))·A·lp."""
    weight = torch.minimum(torch.maximum(given.ratio.detach(), given.low), given.high)
    return -weight * given.advantages * given.lp


@_loss
def dro(given: Given, *, beta: float) -> Tensor:
    """−A·lp + beta/2·(lp − q)².

    The square counts where A is 0, too, but not where q is 0 as well: nothing was sampled there.
    """
    prompt = (given.advantages == 0) & (given.q == 0)
    gap = torch.where(prompt, 0.0, given.inputs.log_probs) - given.q
    return 0.5 * beta * gap.square() - given.advantages * given.lp


@_loss
def gspo(given: Given) -> Tensor:
    """−min(s·A, clip(s, low, high)·A), s = exp(mean of lp − q over sequence_ratio_mask), with the gradient of
    each position's own lp.
    """
    lp, inputs = given.lp.detach(), given.inputs
    gaps = inputs.log_probs.detach() - given.q
    mean = compute_row_mean(gaps, inputs.mask & (inputs.extras[SEQUENCE] != 0))
    # −inf − −inf would be NaN
    own = torch.where(lp == -torch.inf, 0.0, given.lp - lp)
    return given.clip(torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own))
