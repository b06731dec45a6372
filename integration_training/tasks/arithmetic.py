"""Sums in plain text, made by reasoning-gym's chain_sum: the model answers with a number and nothing else.

    [rl.data]
    kind = "reasoning_gym"
    dataset = "chain_sum"
    params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
    size = 2000
    system_prompt = "Answer with the number only."

    [rl.rollout]
    reward = "integration_training.tasks.arithmetic:exact_answer"
    filters = ["integration_training.tasks.arithmetic:keep_mixed"]

Without reasoning-gym: kind = "python", function = "integration_training.tasks.arithmetic:make_rows".
"""

import re
from random import Random

from integration_training.tasks import Row, keep_mixed
from rollouts.types import RewardResult, Sample

__all__ = ["keep_mixed"]  # the filter of this task

NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def make_rows(*, size: int, seed: int, largest: int = 99) -> list[Row]:
    """`size` sums of two whole numbers from 0 to `largest`. Row i depends on (seed, i) alone."""
    draws = (Random(f"arithmetic/{seed}/{index}") for index in range(size))
    sums = [(draw.randint(0, largest), draw.randint(0, largest)) for draw in draws]
    return [{"prompt": f"{first} + {second} =", "answer": str(first + second)} for first, second in sums]


def exact_answer(sample: Sample) -> RewardResult:
    """1 if the response, without white space around it, is the row's answer and nothing else; otherwise 0.

    Parts: `exact`, the reward itself, and `well_formed`, 1 if the response is a number at all.
    Raises KeyError if the sample's row has no answer, so that the sample counts as failed and not as wrong.
    """
    answer = str(sample.metadata["answer"]).strip()
    response = sample.response.strip()
    exact = float(response == answer)
    return RewardResult(exact, {"exact": exact, "well_formed": float(is_number(response))})


def close_answer(sample: Sample) -> RewardResult:
    """1 for the answer and nothing else; for another number half of how near it is: ½·max(0, 1 − |error|/20);
    0 for anything else.

    A near miss tells a small model more than a plain 0 does. Parts: `exact` and `well_formed`. Raises
    KeyError like exact_answer.
    """
    exact = exact_answer(sample)
    if exact.reward or not exact.parts["well_formed"]:
        return exact
    error = abs(float(sample.response) - float(str(sample.metadata["answer"])))
    return RewardResult(0.5 * max(0.0, 1.0 - error / 20.0), exact.parts)


def is_number(text: str) -> bool:
    """Whether `text` is one number in digits, with nothing around it."""
    return NUMBER.fullmatch(text) is not None
