"""Words of small letters, preferred to strings of digits: pairs and labelled responses for [preference] and
[reward_model], prompts for [rl].

    [preference.data]
    kind = "python"
    function = "integration_training.tasks.letter_words:make_pairs"
    size = 200

    [rl.data]
    kind = "python"
    function = "integration_training.tasks.letter_words:make_rows"
    size = 200

    [rl.rollout]
    reward_model = "stage"
    reward = "integration_training.tasks.letter_words:share_of_letters"
    filters = ["integration_training.tasks.letter_words:keep_mixed"]

`reward` stands beside the reward model or instead of it; for loss = "kto" the rows are `make_labels`. What is
preferred can be seen character by character, so that a random two-layer model learns it in seconds.
"""

from random import Random

from integration_training.tasks import Row, keep_mixed
from rollouts.types import RewardResult, Sample

__all__ = ["keep_mixed"]  # the filter of this task

LETTERS, DIGITS = "abcdefgh", "01234567"
SHORTEST, LONGEST = 2, 5  # characters of a response


def make_pairs(*, size: int, seed: int) -> list[Row]:
    """`size` pairs: `chosen` is of letters, `rejected` of digits, each 2 to 5 characters long. Row i depends
    on (seed, i) alone.
    """
    pairs = []
    for index in range(size):
        draw = Random(f"letter_words/{seed}/{index}")
        chosen, rejected = (
            "".join(draw.choice(characters) for _ in range(draw.randint(SHORTEST, LONGEST)))
            for characters in (LETTERS, DIGITS)
        )
        prompt = f"Word {draw.randrange(1000)}-{index}:"
        pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return pairs


def make_labels(*, size: int, seed: int) -> list[Row]:
    """`size` labelled responses: the chosen one of a pair, label true, then the rejected one of the next,
    label false, and so on.
    """
    return [
        {
            "prompt": pair["prompt"],
            "completion": pair["rejected" if index % 2 else "chosen"],
            "label": index % 2 == 0,
        }
        for index, pair in enumerate(make_pairs(size=size, seed=seed))
    ]


def make_rows(*, size: int, seed: int) -> list[Row]:
    """`size` prompts, those of make_pairs, with the chosen response as the answer."""
    return [{"prompt": pair["prompt"], "answer": pair["chosen"]} for pair in make_pairs(size=size, seed=seed)]


def share_of_letters(sample: Sample) -> RewardResult:
    """The share of the response's characters that are of a to h: 1 for a word as it was chosen, 0 for digits
    and for no response.

    Parts: `letters`, the reward itself.
    """
    letters = sum(character in LETTERS for character in sample.response)
    share = letters / len(sample.response) if sample.response else 0.0
    return RewardResult(share, {"letters": share})
