"""How the KL coefficient moves from step to step: fixed, or steered towards a target. Plain arithmetic; the
caller keeps the coefficient.
"""

import math
from collections.abc import Callable
from functools import partial

KLControl = Callable[[float, float, int, float], float]
"""(coefficient, measured KL in nats, samples in the step, KL of the step before) -> the next coefficient."""
KL_RANGE = 0.25, 4.0  # times the target: a KL beyond is as if it were there


def keep_kl_coef(kl_coef: float, kl: float, num_samples: int, before: float = 0.0) -> float:
    """`kl_coef`, whatever was measured."""
    return kl_coef


def compute_adaptive_kl_coef(
    kl_coef: float,
    kl: float,
    num_samples: int,
    before: float = 0.0,
    *,
    target: float,
    horizon: int,
    limit: float = 0.2,
) -> float:
    """kl_coef · (1 + clip(kl/target − 1, ±limit) · num_samples/horizon): larger when the policy is farther
    away than wanted.

    kl and target in the same unit, nats per sample in the paper; horizon in samples: after that many at full
    error the coefficient has moved by `limit`. A KL that is not finite leaves the coefficient alone. Never
    negative. Paper: Ziegler et al. 2019, 1909.08593. Raises ValueError on a target, horizon or limit that is
    not positive.
    """
    if not (target > 0 and horizon > 0 and limit > 0):
        raise ValueError(f"target={target}, horizon={horizon}, limit={limit}; all three must be above 0")
    if not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1.0, -limit), limit)
    return kl_coef * max(0.0, 1.0 + error * num_samples / horizon)


def compute_two_sided_kl_coef(
    kl_coef: float,
    kl: float,
    num_samples: int = 0,
    before: float = 0.0,
    *,
    target: float,
    tolerance: float,
    factor: float = 1.5,
    power: float = 0.0,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> float:
    """kl_coef · factor where kl > target + tolerance, kl_coef / factor where kl < target − tolerance, else
    kl_coef; times (kl / before)^power, both within target/4 and 4·target; within lowest to highest.

    kl, before, target and tolerance in the same unit. With a power the coefficient follows the KL at once;
    with the factor alone, which the KL answers some ten steps late, both swing about the target. Inside the
    band the factor rests, so the coefficient does not drift with noise; outside it moves by the same factor
    however far the KL is. A coefficient of 0 stays 0 unless `lowest` lifts it. A KL that is not finite leaves
    the coefficient alone, bounds included. As the adaptive penalty of PPO (1707.06347, section 4), whose band
    is target/1.5 to target·1.5, factor 2. Raises ValueError on a target that is not positive, a negative
    tolerance or power, a factor not above 1, or bounds other than 0 <= lowest <= highest.
    """
    if not (target > 0 and tolerance >= 0 and factor > 1 and power >= 0):
        raise ValueError(
            f"target={target}, tolerance={tolerance}, factor={factor}, power={power}; the rule is target > 0,"
            " tolerance >= 0, factor > 1 and power >= 0"
        )
    if not 0 <= lowest <= highest:
        raise ValueError(f"lowest={lowest}, highest={highest}; the rule is 0 <= lowest <= highest")
    if not math.isfinite(kl):
        return kl_coef
    if kl > target + tolerance:
        kl_coef *= factor
    elif kl < target - tolerance:
        kl_coef /= factor
    least, most = (bound * target for bound in KL_RANGE)
    kl_coef *= (min(max(kl, least), most) / min(max(before, least), most)) ** power
    return min(max(kl_coef, lowest), highest)


def _bind(control: Callable[..., float], **settings: float) -> KLControl:
    """The controller that has these settings. Raises ValueError for settings out of their range, TypeError
    for those that the controller lacks or does not know.
    """
    bound = partial(control, **settings)
    bound(0.0, 1.0, 0, 0.0)
    return bound


KL_CONTROLS = {
    "fixed": partial(_bind, keep_kl_coef),
    "proportional": partial(_bind, compute_adaptive_kl_coef),
    "two_sided": partial(_bind, compute_two_sided_kl_coef),
}
"""Name -> the function that binds a controller's settings."""


def exceeds_kl_limit(kl: float, *, limit: float) -> bool:
    """Whether the updates on a batch should end here: the policy is farther from where it was before them
    than `limit` allows.

    kl is the `approx_kl/mean` that an update's forward pass measured on its rows, KL(old || policy) in nats
    per token: what the updates before it have done. Asked after every update; True once is the end for this
    batch: a hard stop, which bounds the step where a clip only bounds gradients. A KL that is not finite
    exceeds every limit. Source: early stopping of PPO in OpenAI's Spinning Up, where the limit is 1.5 times
    the wanted KL. Raises ValueError on a limit that is not positive.
    """
    if not limit > 0:
        raise ValueError(f"limit={limit} must be above 0 nats per token; 0.015 is usual")
    return not kl <= limit


def compute_adaptive_entropy_coef(
    entropy_coef: float,
    entropy: float,
    *,
    target: float,
    step: float = 5e-3,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> float:
    """entropy_coef + step where the measured mean entropy, nats, is below target, else entropy_coef − step;
    within lowest to highest.

    The bonus grows only while the policy is less random than wanted, and fades once it is; the paper also
    leaves it out of the loss at once while the entropy is above target. An entropy that is not finite leaves
    the coefficient alone. Paper: Skywork-OR1, 2505.22312. Raises ValueError on a negative step, or bounds
    that are not lowest <= highest.
    """
    if not (step >= 0 and lowest <= highest):
        raise ValueError(
            f"step={step}, lowest={lowest}, highest={highest}; the rule is step >= 0 and lowest <= highest"
        )
    if not math.isfinite(entropy):
        return entropy_coef
    return min(max(entropy_coef + (step if entropy < target else -step), lowest), highest)
