"""An update of two rows, for the tests of what is recorded of it."""

import numpy as np

from rollouts.metrics.token_shards import UpdateRecord
from rollouts.types import ForwardBackwardResult, Mean, OptimStepResult, RolloutBatch, Sample, TokenArrays


def floats(*rows):
    return tuple(np.asarray(row, np.float32) for row in rows)


def make_update(**changes):
    """Two rows of a group: three tokens of which two train, and two tokens of which one does."""
    masks = (np.array([False, True, True]), np.array([False, True]))
    tokens = (np.array([5, 6, 7]), np.array([5, 8]))
    samples = tuple(
        Sample(id=name, prompt="p", tokens=ids, loss_mask=mask, reward=reward)
        for name, ids, mask, reward in zip(("a", "b"), tokens, masks, (1.0, -0.5), strict=True)
    )
    batch = RolloutBatch(
        tokens=tokens,
        loss_masks=masks,
        rollout_log_probs=floats([0, -1.5, -2], [0, -2.5]),
        weight_versions=tuple(np.where(mask, 17, -1) for mask in masks),
        rewards=np.array([1.0, -0.5], np.float32),
        advantages=floats([0, 0.5, 1.5], [0, -2.0]),
        mean_advantages=np.array([1.0, -2.0], np.float32),
        group_indices=np.array([4, 4]),
        samples=samples,
    )
    traced = TokenArrays(
        log_probs=floats([0, -1, -2], [0, -3]),
        slopes=floats([0, -0.125, 0.25], [0, 0.375]),
        weights=floats([0, 1.0, 0.5], [0, 2.0]),
    )
    forward = ForwardBackwardResult(
        loss=-0.0625, denominator=3.0, metrics={"kl/ref": Mean(0.3, 3.0)}, per_token=traced
    )
    optim = OptimStepResult(step=7, lr=3e-4, grad_norm=2.5, clipped=True)
    update = UpdateRecord(update=1, batch=batch, forward=forward, optim=optim, kl_coef=0.05, contributes=True)
    return update._replace(**changes)
