"""What policies' distributions say, exactly, over the whole vocabulary, and what responses say of a policy.
Axes: N positions, V vocabulary, B rows, T tokens. In nats.

No gradient. Divergences are taken a tile of positions at a time (rollouts.losses.distillation). Diversity of
responses is in rollouts.evaluation.diversity, intervals in rollouts.evaluation.intervals.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollouts.evaluation.diversity import compute_distinct_n, compute_self_bleu
from rollouts.losses.distillation import compute_tiled_divergence
from rollouts.types import FloatRows, Mean, RolloutBatch


class PolicyDivergence(NamedTuple):
    """Means over positions, in nats; they merge across batches and ranks."""

    kl: Mean  # KL(policy || reference)
    reverse_kl: Mean  # KL(reference || policy)
    jsd: Mean  # Jensen-Shannon divergence, between 0 and log 2
    entropy: Mean  # of the policy
    ref_entropy: Mean  # of the reference
    top1_agreement: Mean  # share of positions at which both put the same token first


@torch.no_grad()
def compute_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """[N] entropy of softmax(logits [N, V] / temperature): 0 to log V. A token of probability 0 (logit -inf)
    adds nothing.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.special.entr((wide / temperature).softmax(-1)).sum(-1)


@torch.no_grad()
def compute_policy_divergence(
    logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0
) -> PolicyDivergence:
    """How far a policy is from a reference, exactly, at N positions, from logits [N, V] of both.

    Averaged over positions of text that the policy sampled, `kl` is the KL per token that k1 and k3 estimate,
    without their variance. No position gives means without a value. Raises ValueError if the shapes differ,
    ConfigError unless temperature > 0.
    """

    def mean(values: Tensor) -> Mean:
        return Mean(float(values.double().sum()), len(values))

    def divergence(beta: float) -> Mean:
        return mean(compute_tiled_divergence(logits, ref_logits, beta=beta, temperature=temperature))

    return PolicyDivergence(
        kl=divergence(1.0),
        reverse_kl=divergence(0.0),
        jsd=divergence(0.5),
        entropy=mean(compute_entropy(logits, temperature=temperature)),
        ref_entropy=mean(compute_entropy(ref_logits, temperature=temperature)),
        top1_agreement=mean(logits.argmax(-1) == ref_logits.argmax(-1)),
    )


def measure_responses(batch: RolloutBatch, scores: Sequence[FloatRows]) -> dict[str, float]:
    """What the responses of a batch say of the policy that sampled them; `scores` are its log-probs and its
    entropies, as `forward_with_entropy` of a backend gives them, and, if there is a third, log-probs of
    another model. The batch must have a token that trains.

    Over all trained tokens together: perplexity, exp of the mean negative log-prob; entropy, its mean; kl,
    the mean of log-prob − that of the other model: the k1 estimate of KL(policy ‖ other) if the policy
    sampled the tokens at the temperature of the batch. distinct_1, distinct_2 and self_bleu: see
    rollouts.evaluation.diversity, of the ids of the trained tokens, all rows together. What has no finite
    value is left out.
    """
    mask = np.concatenate(batch.loss_masks)
    log_prob, entropy, *other = (np.concatenate(rows)[mask].mean(dtype=np.float64) for rows in scores)
    responses = [row[own].tolist() for row, own in zip(batch.tokens, batch.loss_masks, strict=True)]
    found = {
        "perplexity": float(np.exp(-log_prob)),
        "entropy": float(entropy),
        "kl": float(log_prob - other[0]) if other else None,
        **{f"distinct_{n}": compute_distinct_n(responses, n) for n in (1, 2)},
        "self_bleu": compute_self_bleu(responses) if len(responses) > 1 else None,
    }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
