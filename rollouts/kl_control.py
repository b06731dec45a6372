"""How the KL coefficient moves from step to step: fixed, or steered towards a target. Plain arithmetic; the caller keeps the coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable

KLControl = Callable[[float, float, int], float]
"""(coefficient, measured KL in nats, samples in the step) -> the coefficient of the next step."""


def keep_kl_coef(kl_coef: float, kl: float, num_samples: int) -> float:
    """`kl_coef`, whatever was measured."""
    return kl_coef


def compute_adaptive_kl_coef(kl_coef: float, kl: float, num_samples: int, *, target: float, horizon: int, limit: float = 0.2) -> float:
    """kl_coef · (1 + clip(kl/target − 1, ±limit) · num_samples/horizon): larger when the policy is farther away than wanted.

    kl and target in the same unit, nats per sample in the paper; horizon in samples: after that many at full error the coefficient has
    moved by `limit`. A KL that is not finite leaves the coefficient alone. Never negative.
    Paper: Ziegler et al. 2019, 1909.08593. Raises ValueError on a target, horizon or limit that is not positive.
    """
    if not (target > 0 and horizon > 0 and limit > 0):
        raise ValueError(f"target={target}, horizon={horizon}, limit={limit}; all three must be above 0")
    if not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / target - 1.0, -limit), limit)
    return kl_coef * max(0.0, 1.0 + error * num_samples / horizon)


def make_adaptive_kl_control(*, target: float, horizon: int, limit: float = 0.2) -> KLControl:
    """The proportional controller with its settings bound; see `compute_adaptive_kl_coef`."""
    compute_adaptive_kl_coef(0.0, target, 0, target=target, horizon=horizon, limit=limit)

    def adapt(kl_coef: float, kl: float, num_samples: int) -> float:
        return compute_adaptive_kl_coef(kl_coef, kl, num_samples, target=target, horizon=horizon, limit=limit)

    return adapt
