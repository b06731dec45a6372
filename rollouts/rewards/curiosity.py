"""Curiosity: how far the second half of a response is from what a small model expects after the first, which
learns from each batch that trains.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollouts.rewards.check import require_choice
from rollouts.types import RolloutBatch, Sample

Samples = Sequence[Sample]  # of one group, or of a batch


def halve(samples: Samples, *, alone: bool = False) -> RolloutBatch:
    """Two rows of each sample: the first half of its sampled tokens, and the second, which may be shorter by
    one, each after all that comes before. alone: instead of the first the second, without the first half.
    """
    rows = []
    for one in samples:
        mask = one.loss_mask
        first = mask & (mask.cumsum() * 2 <= one.response_length + 1)
        second = mask ^ first
        other = (one.tokens[~first], second[~first]) if alone else (one.tokens, first)
        rows += [other, (one.tokens, second)]
    tokens, masks = zip(*rows, strict=True)
    return RolloutBatch(tokens=tokens, loss_masks=masks)


async def curiosity(
    samples: Samples,
    *,
    backend: Any = None,
    state: Any = None,
    learn: bool = False,
    eta: float = 0.5,
    cap: float = 1.0,
    pay: str = "error",
    lr: float = 0.1,
) -> Any:
    """A group reward [G] of η · e / σ², between −cap and cap, where e = ½ |φ1 W − φ2|²; 0 for fewer than two
    tokens, and without a backend.

    φ1, φ2: the sums of the policy's hidden states over both halves of a response, as vectors of length 1. W
    begins at 0 and goes a step of size `lr` down the gradient of e for each sample that trains. σ²: the mean
    of e in the batches before, and of one ½, which e begins with. pay="progress": e with the W before the
    last batch, less e with that after it, in place of e. It may be below 0, for noise, which has none to
    make, is as often unlucky as lucky.

    Raises ConfigError, and what the backend raises.
    """
    require_choice("pay", pay, ("error", "progress"))
    if not backend:
        return [0.0] * len(samples)
    found = await backend.forward_with_entropy(halve(samples), project=True)
    states = np.asarray([[*map(np.sum, kind)] for kind in found[2:]], np.float64).T
    states /= np.linalg.norm(states, axis=1, keepdims=True) + 1e-30
    first, second = states[::2], states[1::2]
    older, newest, total, count = state.get("learnt", (0.0, 0.0, 0.5, 1))
    before, after = (((np.dot(first, one) - second) ** 2).sum(1) / 2 for one in (older, newest))
    if learn:
        learnt = newest
        for one, two in zip(first, second, strict=True):
            learnt = learnt + lr * np.outer(one, two - np.dot(one, learnt))
        state["learnt"] = newest, learnt.tolist(), total + after.sum(), count + len(samples)
    paid = before - after if pay == "progress" else after
    return np.clip(eta * paid * count / total, -cap, cap) * second.any(1)
