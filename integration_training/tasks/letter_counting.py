"""Letter counting: how often does a letter occur in a word?

[rl.data]
kind = "python"
function = "integration_training.tasks.letter_counting:make_rows"
size = 2000
seed = 1

[rl.rollout]
reward = "integration_training.tasks.letter_counting:counts_right"
filters = ["integration_training.tasks.letter_counting:keep_mixed"]
"""

import random
import re

from integration_training.tasks import Row, keep_mixed, make_task
from rollouts.types import RewardResult, Sample

__all__ = ["keep_mixed"]  # the filter of this task

WORDS = """
strawberry banana mississippi committee bookkeeper assessment
successful parallel occurrence possession tennessee balloon raspberry
connection grammar referee accommodation embarrass millennium
questionnaire recommendation intelligence address beginning coffee
happiness letter butter pepper rabbit summer yellow weekend keyboard
window garden orange planet rocket silver tunnel velvet walnut zipper
anchor basket candle dragon engine falcon guitar hammer island jacket
kitten ladder
""".split()  # noqa: SIM905
FINAL_NUMBER = re.compile(r"\d+(?!.*\d)", re.DOTALL)


def _make_row(draw: random.Random) -> Row:
    """A question; a quarter ask for a letter that is not in the word."""
    word = draw.choice(WORDS)
    present = draw.random() >= 0.25
    letters = sorted(set(word)) if present else sorted(set("abcdefghijklmnopqrstuvwxyz") - set(word))
    letter = draw.choice(letters)
    prompt = f"How many times does the letter {letter} occur in the word {word}? Answer with the number only."
    return {"prompt": prompt, "answer": str(word.count(letter)), "word": word, "letter": letter}


make_rows = make_task("letters", _make_row)


def counts_right(sample: Sample) -> RewardResult:
    """1 if the last number of the response is the count and it is all there is; 0.5 if there are words around
    it; otherwise 0.

    Parts: `right` and `number_only`.
    """
    response = sample.response.strip()
    found = FINAL_NUMBER.search(response)
    right = float(
        found is not None and found.group().lstrip("0") == str(sample.metadata["answer"]).lstrip("0")
    )
    number_only = float(response.isascii() and response.isdigit())
    return RewardResult(right * (0.5 + 0.5 * number_only), {"right": right, "number_only": number_only})
