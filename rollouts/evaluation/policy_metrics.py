"""What two policies' distributions say, exactly, over the whole vocabulary. Axes: N positions, V vocabulary,
B rows, T tokens. In nats.

No gradient. Divergences are taken a tile of positions at a time (rollouts.losses.distillation). Responses'
diversity is in rollouts.evaluation.diversity, intervals in rollouts.evaluation.intervals.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollouts.losses.distillation import compute_tiled_divergence
from rollouts.types import Mean


@dataclass(frozen=True, slots=True)
class PolicyDivergence:
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
        return Mean(float(values.double().sum()), float(len(values)))

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


@torch.no_grad()
def compute_perplexity(log_probs: Tensor, mask: Tensor) -> float | None:
    """exp of the mean negative log-prob of the masked tokens of [B, T], all rows together; None without a
    token.

    A token of probability 0 gives inf. What lies outside the mask never counts. Raises ValueError if the
    shapes differ.
    """
    if log_probs.shape != mask.shape:
        raise ValueError(
            f"log_probs have shape {tuple(log_probs.shape)}, the mask {tuple(mask.shape)}; both must be"
            " [B, T]"
        )
    kept = log_probs[mask].double()
    return float((-kept.mean()).exp()) if len(kept) else None
