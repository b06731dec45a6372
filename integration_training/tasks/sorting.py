"""Sorting: put a list of numbers into ascending order.

[rl.data]
kind = "python"
function = "integration_training.tasks.sorting:make_rows"
params = { shortest = 3, longest = 6 }
size = 2000
seed = 1

[rl.rollout]
reward = "integration_training.tasks.sorting:in_order"
filters = ["integration_training.tasks.sorting:keep_mixed"]
"""

import itertools
import random
import re
from collections import Counter

from integration_training.tasks import Row, keep_mixed, make_task
from rollouts.types import RewardResult, Sample

__all__ = ["keep_mixed"]  # the filter of this task

SEPARATED_NUMBERS = re.compile(r"-?\d+(?:\s*,\s*-?\d+)*")


def _make_row(draw: random.Random, *, shortest: int = 3, longest: int = 6, largest: int = 99) -> Row:
    """A list of `shortest` to `longest` whole numbers from 0 to `largest`."""
    numbers = [draw.randint(0, largest) for _ in range(draw.randint(shortest, longest))]
    prompt = (
        f"Sort these numbers from the smallest to the largest: {_write(numbers)}\nAnswer with the numbers"
        " only, separated by commas."
    )
    return {"prompt": prompt, "answer": _write(sorted(numbers)), "numbers": numbers}


make_rows = make_task("sorting", _make_row)


def _write(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def in_order(sample: Sample) -> RewardResult:
    """1 for the sorted list; for another order of the same numbers half of the share of neighbours in order;
    otherwise 0.

    Parts: `sorted`, and `same_numbers`, 1 if the response holds the given numbers and no others.
    """
    response = sample.response.strip().removeprefix("[").removesuffix("]").strip()
    if not SEPARATED_NUMBERS.fullmatch(response):
        return RewardResult(0.0, {"sorted": 0.0, "same_numbers": 0.0}, note="not a list of numbers")
    found = [int(number) for number in response.split(",")] if len(response) < 1000 else []
    if Counter(found) != Counter(sample.metadata["numbers"]):
        return RewardResult(0.0, {"sorted": 0.0, "same_numbers": 0.0}, note="other numbers than were given")
    pairs = list(itertools.pairwise(found))
    share = sum(first <= second for first, second in pairs) / len(pairs)
    is_sorted = float(share == 1.0)
    return RewardResult(is_sorted or 0.5 * share, {"sorted": is_sorted, "same_numbers": 1.0})
