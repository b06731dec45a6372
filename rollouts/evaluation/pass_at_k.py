"""pass@k: the probability that at least one of k answers to a prompt is right, estimated without bias from n
>= k answers.
"""

import math
from collections.abc import Sequence


def compute_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k) for one prompt: the share of the k-subsets of its n answers that hold one of
    the c right ones.

    Exact, also for n in the thousands. 1 − (1 − c/n)^k, which looks alike, is biased downwards. Paper: Codex,
    2107.03374. Raises ValueError unless 0 <= c <= n and 1 <= k <= n: from fewer than k answers there is no
    unbiased estimate.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"num_correct={num_correct} of num_samples={num_samples}; it must lie between 0 and that"
        )
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k={k} with {num_samples} samples; k must be at least 1 and at most the number of samples: take"
            " more samples a prompt"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def compute_mean_pass_at_k(outcomes: Sequence[Sequence[bool]], k: int) -> float:
    """The mean of `compute_pass_at_k` over prompts, outcomes[i] saying which answers to prompt i are right;
    their numbers may differ.

    Raises ValueError if there is no prompt, or naming the prompt that has fewer than k answers.
    """
    if not outcomes:
        raise ValueError("there is no prompt to take pass@k over")
    for index, answers in enumerate(outcomes):
        if len(answers) < k:
            raise ValueError(
                f"prompt {index} has {len(answers)} answers; pass@{k} needs at least {k}: leave it out and"
                " say so, or lower k"
            )
    return math.fsum(
        compute_pass_at_k(len(answers), sum(map(bool, answers)), k) for answers in outcomes
    ) / len(outcomes)
