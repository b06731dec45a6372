r"""The response's number is the answer's, compared as exact fractions.

The number is the last one in the last \boxed{…}, else after the last ####, else in the whole response.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rollouts.errors import DataError
from rollouts.rewards.exact import read_answer
from rollouts.types import RewardResult, Sample

# a sign only where it cannot be a minus between two terms; commas only where they group thousands
NUMBER = re.compile(r"(?:(?<![\w)\]])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
FINAL_MARK = "####"


def numeric_match(sample: Sample, *, key: str = "answer", tolerance: float = 0.0) -> RewardResult:
    """1 if the number that the response ends with equals metadata[key] within `tolerance` · max(1, |answer|); otherwise 0.

    1,000 = 1000, 0.5 = 1/2, 7.0 = 7. Parts: `numeric`, the reward itself, and `has_number`, 1 if the response holds a number at all.
    Raises DataError if the sample has no such key or the answer holds no number.
    """
    answer = read_answer(sample, key)
    wanted = find_final_number(str(answer))
    if wanted is None:
        raise DataError(f"sample {sample.id}: metadata[{key!r}] is {str(answer)[:80]!r}, which holds no number")
    found = find_final_number(sample.response)
    close = found is not None and abs(found - wanted) <= Fraction(tolerance) * max(1, abs(wanted))
    return RewardResult(float(close), {"numeric": float(close), "has_number": float(found is not None)})


def find_final_number(text: str) -> Fraction | None:
    """The number that a text ends up with; None if it has none, or one that is no number (7/0, thousands of digits)."""
    text = text.replace("−", "-")
    boxed = BOXED.findall(text)
    place = boxed[-1] if boxed else text.rpartition(FINAL_MARK)[2]
    numbers = NUMBER.findall(place)
    if not numbers:
        return None
    try:
        return Fraction(numbers[-1].replace(",", ""))
    except (ValueError, ZeroDivisionError):  # Python refuses to read integers of more than 4300 digits
        return None
