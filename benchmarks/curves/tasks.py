"""Next letters: a word of a few letters is answered with the letter after each of its letters, "dog" with
"eph".

A model of 0.1 M parameters learns it from nothing in about a minute, and half of it by a few steps of SFT, so
that RL has something to do. There are more words than a run draws: a reward that rises rises on prompts that
were not seen before.
"""

import random
from typing import Any

from rollouts.filters import check_mixed_accuracy
from rollouts.rewards.length import make_soft_overlong_punishment
from rollouts.types import FilterDecision, RewardResult, Sample, SampleGroup

LETTERS = "abcdefgh"  # of prompts; answers are made of "bcdefghi"
LATE = "fghi"
PUNISH_OVERLONG = make_soft_overlong_punishment(
    max_tokens=8, buffer_tokens=3
)  # a right answer and its end are 5 tokens


def make_rows(*, size: int, seed: int, length: int = 4, wrong: float = 0.0) -> list[dict[str, Any]]:
    """`size` words of `length` letters with their answers, and the conversation that SFT trains on. Row i
    depends on (seed, i) alone.

    In the conversation each letter of the answer is another one with probability `wrong`: demonstrations by
    somebody who errs.
    """
    return [_make_row(random.Random(f"letters/{seed}/{index}"), length, wrong) for index in range(size)]


def _make_row(draw: random.Random, length: int, wrong: float = 0.0) -> dict[str, Any]:
    word = "".join(draw.choice(LETTERS) for _ in range(length))
    answer = shift(word)
    shown = "".join(draw_other(draw, letter) if draw.random() < wrong else letter for letter in answer)
    messages = [{"role": "user", "content": word}, {"role": "assistant", "content": shown}]
    return {"prompt": word, "answer": answer, "messages": messages}


def draw_other(draw: random.Random, letter: str) -> str:
    """Another letter that answers are made of."""
    return draw.choice(shift(LETTERS).replace(letter, ""))


def shift(word: str) -> str:
    """The letter after each letter of `word`."""
    return "".join(chr(ord(letter) + 1) for letter in word)


def right_letters(sample: Sample) -> RewardResult:
    """The share of places with the right letter, of the longer of response and answer. Parts: `exact`, and
    `share`, the reward itself.
    """
    answer, response = str(sample.metadata["answer"]), sample.response
    same = sum(mine == right for mine, right in zip(response, answer, strict=False))
    share = same / max(len(answer), len(response))
    return RewardResult(share, {"exact": float(response == answer), "share": share})


def share_of_digits(sample: Sample) -> float:
    """The share of the response's characters that are digits: a dense reward for a language model."""
    return sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))


def exact(sample: Sample) -> RewardResult:
    """1 for the answer and nothing else, otherwise 0. Part `exact` is the reward itself."""
    right = float(sample.response == str(sample.metadata["answer"]))
    return RewardResult(right, {"exact": right})


def exact_and_short(sample: Sample) -> RewardResult:
    """`exact`, less up to 1 for a response that nears the end of the budget (DAPO's soft punishment). Parts:
    `exact` and `overlong`.
    """
    right, over = exact(sample), PUNISH_OVERLONG(sample)
    return RewardResult(right.reward + over.reward, {**right.parts, **over.parts})


def keep_mixed(group: SampleGroup) -> FilterDecision:
    """Keeps a group that is neither always nor never right: DAPO's dynamic sampling, which must not see the
    punishment.
    """
    return check_mixed_accuracy(group, part="exact")


def make_pairs(*, size: int, seed: int, length: int = 4) -> list[dict[str, Any]]:
    """`size` words, with the right answer as `chosen` and one with 1 to `length` wrong letters as `rejected`.
    Row i depends on (seed, i) alone.
    """
    return [_make_pair(random.Random(f"pairs/{seed}/{index}"), length) for index in range(size)]


def _make_pair(draw: random.Random, length: int) -> dict[str, Any]:
    row = _make_row(draw, length)
    wrong = set(draw.sample(range(length), draw.randint(1, length)))
    rejected = "".join(
        draw_other(draw, right) if place in wrong else right for place, right in enumerate(row["answer"])
    )
    return {"prompt": row["prompt"], "chosen": row["answer"], "rejected": rejected}


# --- a taste, which does not depend on the prompt -----------------------------------------------------------


def count_late(response: str) -> int:
    """How many letters of LATE the response begins with, up to 4: once another one comes, those after it do
    not count.
    """
    return next((place for place, letter in enumerate(response[:4]) if letter not in LATE), len(response[:4]))


def late_letters(sample: Sample) -> RewardResult:
    """A quarter for each letter of LATE at the beginning; 0 unless the response has four letters. Much of it
    is settled early in the response.
    """
    share = count_late(sample.response) / 4 if len(sample.response) == 4 else 0.0
    return RewardResult(share, {"late": share})


def make_taste_pairs(*, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` words with two random answers, of which `chosen` begins with more letters of LATE. Row i depends
    on (seed, i) alone.
    """
    return [_make_taste_pair(random.Random(f"taste/{seed}/{index}")) for index in range(size)]


def _make_taste_pair(draw: random.Random) -> dict[str, Any]:
    first = second = ""
    while count_late(first) == count_late(second):
        first, second = ("".join(draw.choice(shift(LETTERS)) for _ in range(4)) for _ in range(2))
    rejected, chosen = sorted((first, second), key=count_late)
    return {"prompt": _make_row(draw, 4)["prompt"], "chosen": chosen, "rejected": rejected}
