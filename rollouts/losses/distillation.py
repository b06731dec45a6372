"""Distillation: a student learns the distribution of a teacher. Axes: N positions, V vocabulary, B rows, T
tokens. All in nats.

Here: exact divergences over the whole vocabulary, at each position, without the variance of sampling; they
need the logits of both. The other way, by sampled tokens, needs one log-prob per token of the teacher and is
in rollouts.advantages.distillation, with self-distillation.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollouts.losses.inputs import LossOutput, check_numbers, collect_token_metrics, reduce_loss
from rollouts.losses.kl import sum_kl_terms
from rollouts.losses.logprobs import widen
from rollouts.types import LossUnit

DIVERGENCE_TILE = 16 * 2**20  # logits of one model that are held at a time: 64 MiB in float32


def compute_divergence(
    student_logits: Tensor, teacher_logits: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """[N] generalised Jensen-Shannon divergence between softmax(teacher / temperature) and softmax(student /
    temperature), [N, V] each.

    beta in (0, 1)   β·KL(teacher || m) + (1 − β)·KL(student || m), m = β·teacher + (1 − β)·student
    beta = 0         KL(teacher || student): forward, covers what the teacher does
    beta = 1         KL(student || teacher): reverse, seeks the teacher's mode

    The two ends are set, not limits: the formula itself goes to 0 there, and its quotient by β, or by 1 − β,
    to these values. The teacher gets no gradient. A token with a logit of -inf has probability 0 and adds
    nothing to the side that gives it 0; where a KL is infinite the result is inf. Logits are widened to
    float32 (float64 stays). Paper: GKD, 2306.13649, eq. 1. Raises ConfigError unless 0 <= beta <= 1 and
    temperature > 0, ValueError if the shapes differ (vocabularies that are padded differently: cut both to
    the tokenizer's size).
    """
    check_numbers("divergence", beta=beta, temperature=temperature)
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student_logits are {tuple(student_logits.shape)}, teacher_logits {tuple(teacher_logits.shape)};"
            " both must be [N, V] with one vocabulary: cut padded ones to the tokenizer's size"
        )
    student, teacher = (
        (widen(logits) / temperature).log_softmax(-1) for logits in (student_logits, teacher_logits.detach())
    )
    if beta == 0:
        return sum_kl_terms(teacher, student)
    if beta == 1:
        return sum_kl_terms(student, teacher)
    # log(β·e^teacher + (1 − β)·e^student); where both are -inf it is finite, and not read: logaddexp has a
    # NaN gradient there
    dead = (student == -torch.inf) & (teacher == -torch.inf)
    held_student, held_teacher = (torch.where(dead, 0.0, each) for each in (student, teacher))
    mixture = torch.logaddexp(held_student + math.log1p(-beta), held_teacher + math.log(beta))
    return beta * sum_kl_terms(teacher, mixture) + (1 - beta) * sum_kl_terms(student, mixture)


def compute_tiled_divergence(
    student_logits: Tensor, teacher_logits: Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """`compute_divergence`, at most DIVERGENCE_TILE logits of each model at a time, forward and backward:
    beside the two [N, V] only the gradient is whole.

    What lies between the logits and the result is computed again for the gradient.
    """
    return _in_tiles(
        partial(compute_divergence, beta=beta, temperature=temperature),
        student_logits,
        teacher_logits,
        vocab_size=student_logits.shape[-1],
    )


def compute_linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """[N] the same from hidden states [N, H], [N, H'] and heads [V, H], [V, H']: neither model's [N, V]
    logits ever exist as a whole.

    At most DIVERGENCE_TILE logits of each model at a time, computed again for the gradient, which goes to
    `hidden` and `weight`. Products are in the precision of what is given; the softmax is in float32 (float64
    stays). Raises what `compute_divergence` raises.
    """
    if len(weight) != len(teacher_weight):
        raise ValueError(
            f"the heads have {len(weight)} and {len(teacher_weight)} rows; both models must have one"
            " vocabulary"
        )
    return _in_tiles(
        lambda student, teacher: compute_divergence(
            student @ weight.T, teacher @ teacher_weight.T, beta=beta, temperature=temperature
        ),
        hidden,
        teacher_hidden,
        vocab_size=len(weight),
    )


def gkd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    unit: LossUnit = "tokens",
) -> LossOutput:
    """The divergence of `compute_divergence` at every position of mask [B, T], of logits [B, T, V]; summed,
    in the loss's unit.

    Only masked positions are computed; what lies elsewhere, NaN included, never counts. `divergence/mean` is
    the mean over tokens, nats. beta = 1 with the student's own samples is the exact form of on-policy
    distillation; beta = 0 on a dataset is word-level distillation. Paper: 2306.13649. Raises what
    `compute_divergence` raises, and ValueError if the logits are not of the mask's rows and tokens.
    """
    if student_logits.shape[:-1] != mask.shape:
        raise ValueError(
            f"student_logits are {tuple(student_logits.shape)}; the first two axes must be those of the mask,"
            f" {tuple(mask.shape)}"
        )
    rows = mask.flatten().nonzero().squeeze(-1)
    student, teacher = (
        logits.flatten(0, 1).index_select(0, rows) for logits in (student_logits, teacher_logits)
    )
    values = compute_tiled_divergence(student, teacher, beta=beta, temperature=temperature)
    token_losses = values.new_zeros(mask.shape).masked_scatter(mask, values)
    metrics = collect_token_metrics({"divergence/mean": token_losses}, mask)
    return LossOutput(*reduce_loss(token_losses, mask, unit), metrics)


def _in_tiles(
    function: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor, *, vocab_size: int
) -> Tensor:
    """The function's results [n], for as many positions at a time as have DIVERGENCE_TILE logits."""
    rows = max(DIVERGENCE_TILE // max(vocab_size, 1), 1)
    parts = [
        checkpoint(function, one, other, use_reentrant=False, preserve_rng_state=False)
        for one, other in zip(first.split(rows), second.split(rows), strict=True)
    ]
    return torch.cat(parts)
