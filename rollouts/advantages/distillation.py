"""On-policy distillation by sampled tokens: how much likelier a teacher finds each token. numpy only. Axes: B
rows, T_i tokens of row i.

Self-distillation (SDFT, 2601.19897) is the same with a teacher that is the model itself, or a moving average
of it, and sees a demonstration in its prompt: the student's response is scored after both prompts, and
`align_rows` brings the two rows together. Exact divergences over the whole vocabulary are in
rollouts.losses.distillation.
"""

from collections.abc import Sequence

import numpy as np

from rollouts.advantages.inputs import FloatRows, Masks, require, scatter_trained, take_trained
from rollouts.types import FloatArray


def compute_distillation_advantages(
    teacher_log_probs: Sequence[FloatArray],
    log_probs: Sequence[FloatArray],
    loss_masks: Masks,
    *,
    coef: float = 1.0,
    clip: float | None = None,
) -> FloatRows:
    """A_t = coef·(teacher_log_prob − log_prob) of each trained token, one array [T_i] per row, 0 elsewhere:
    minus the k1 of the reverse KL.

    log_probs: of the policy that sampled (the rollouts'). With `reinforce` or `importance_sampling` the
    expected gradient is that of −coef·KL(student || teacher) token by token, without the terms of later
    tokens (a discount of 0). Add them to task advantages to mix the two. clip: |A_t| is held below it; None:
    not at all. A teacher's -inf is then −clip; without a clip it is refused. A student's log-prob of a token
    that it sampled must be finite in any case. Papers: 2306.13649; Thinking Machines 2025, "On-Policy
    Distillation". Raises ValueError unless coef > 0 and clip > 0, on lengths that differ, and naming the row
    and token that is not finite.
    """
    require(
        coef > 0 and (clip is None or clip > 0),
        f"distillation: coef={coef}, clip={clip}; both must be above 0, or clip None: no clip",
    )
    students = take_trained("log_probs", log_probs, loss_masks)
    advantages = []
    for row, (teacher, student, mask) in enumerate(zip(teacher_log_probs, students, loss_masks, strict=True)):
        require(
            teacher.shape == mask.shape,
            f"teacher_log_probs[{row}] has shape {teacher.shape} and its mask {mask.shape}",
        )
        gap = coef * (np.float64(teacher[mask]) - student)
        advantages.append(scatter_trained(gap if clip is None else np.clip(gap, -clip, clip), mask))
    take_trained("advantages", advantages, loss_masks)  # an impossible token needs a clip
    return tuple(advantages)


def align_rows(teacher_values: Sequence[FloatArray], teacher_masks: Masks, loss_masks: Masks) -> FloatRows:
    """The teacher's values of each response at the student's positions, one array [T_i] per row, 0.0
    elsewhere.

    Both rows end in the same response, after prompts of different lengths, and their masks select it: the
    k-th masked position of the one is the k-th of the other. Raises ValueError naming a row whose masks
    select different numbers of tokens: that is another response.
    """
    aligned = []
    for row, (values, teacher_mask, mask) in enumerate(
        zip(teacher_values, teacher_masks, loss_masks, strict=True)
    ):
        theirs, ours = teacher_mask.sum(), mask.sum()
        require(
            theirs == ours, f"row {row}: the teacher's mask selects {theirs} tokens, the student's {ours}"
        )
        aligned.append(scatter_trained(values[teacher_mask], mask))
    return tuple(aligned)
