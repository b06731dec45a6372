"""The tasks of benchmarks.e2e_reward and benchmarks.lora: rows, and one reward for both sides.

digits   dense: the share of digits among the response's characters, of at least 12; it can be learned in a
         dozen steps
sums     reasoning-gym's chain_sum of two numbers of one digit: 1 if the last number of the response is the
         answer, else half of how near it is, 0 without a number
addition the RL task of integration_training/configs/demo.toml
"""

import random
import re
import tomllib
from pathlib import Path
from typing import Any

from integration_training.tasks.arithmetic import is_number
from rollouts.types import Sample

NUMBER = re.compile(r"-?\d+")
FULL_LENGTH = 12  # characters from which the share of digits is not below what was written
NEAR = 20.0  # an error that is worth nothing
DEMO = Path("integration_training/configs/demo.toml")
THINGS = (
    "phone",
    "room",
    "train",
    "bus",
    "house",
    "account",
    "order",
    "ticket",
    "flight",
    "parcel",
    "seat",
    "lottery",
)


def score_digits(response: str, answer: str) -> float:
    """In 0 to 1."""
    text = response.strip()
    return sum(character.isdigit() for character in text) / max(len(text), FULL_LENGTH)


def score_sum(response: str, answer: str) -> float:
    """In 0 to 1."""
    numbers = NUMBER.findall(response)
    if not numbers:
        return 0.0
    error = abs(int(numbers[-1][:9]) - int(answer))
    return 1.0 if error == 0 else 0.5 * max(0.0, 1.0 - error / NEAR)


def score_addition(response: str, answer: str) -> float:
    """In 0 to 1; as close_answer of the demo."""
    text = response.strip()
    return score_sum(text, answer) if is_number(text) else 0.0


SCORES = {"digits": score_digits, "sums": score_sum, "addition": score_addition}


def reward_digits(sample: Sample) -> float:
    """As our runs name it."""
    return score_digits(sample.response, str(sample.metadata["answer"]))


def reward_sums(sample: Sample) -> float:
    """As our runs name it."""
    return score_sum(sample.response, str(sample.metadata["answer"]))


def reward_addition(sample: Sample) -> float:
    """As our runs name it."""
    return score_addition(sample.response, str(sample.metadata["answer"]))


def make_rows(task: str, *, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows with `prompt` and `answer`, no two prompts alike."""
    if task == "digits":
        draw = random.Random(f"{task}/{seed}")
        numbers = draw.sample(range(100, 10_000), count)
        return [
            {"prompt": f"Give me a {draw.choice(THINGS)} number for customer {number}.", "answer": ""}
            for number in numbers
        ]
    import reasoning_gym  # pyright: ignore[reportMissingTypeStubs]

    name, params = "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    if task == "addition":
        source = tomllib.loads(DEMO.read_text("utf-8"))["rl"]["data"]
        name, params, seed = source["dataset"], source["params"], source["seed"] + 1000 * count * seed
    rows: dict[str, dict[str, Any]] = {}
    made: Any = reasoning_gym.create_dataset(name, **params, size=100 * count, seed=seed)
    for row in made:
        rows.setdefault(row["question"], {"prompt": row["question"], "answer": row["answer"]})
        if len(rows) == count:
            break
    return list(rows.values())
