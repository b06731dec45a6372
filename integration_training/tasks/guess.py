"""Guess a number: ten numbers are possible, four guesses are allowed, and after each the game says whether
the number is higher or lower.

    [rl.data]
    kind = "python"
    function = "integration_training.tasks.guess:make_rows"
    size = 2000

    [rl.rollout]
    environment = "integration_training.tasks.guess:Guess"
    max_turns = 4

Who bisects always finds it; four different guesses that do not heed the feedback find it in 4 of 10 games.
`make_examples` are games for [sft]: in every second one the guesses heed the feedback, in the others they are
drawn from all ten.
"""

import re
from random import Random

from integration_training.tasks import Row, keep_mixed
from rollouts.environments.protocol import Observation, Turn
from rollouts.types import Fields

__all__ = ["keep_mixed"]  # the filter of this task

COUNT, GUESSES = 10, 4


class Guess:
    """One game. The reward is 1 for the number, once. Without the row's `feedback` it only says "wrong"."""

    def __init__(self, row: Fields) -> None:
        self.secret, self.feedback = int(row["answer"]), bool(row.get("feedback", True))
        self.guesses = 0

    async def step(self, turn: Turn) -> Observation:
        """What the game says to a guess: the first whole number of the turn."""
        self.guesses += 1
        found = re.search(r"-?\d{1,9}", turn.text)
        guess = int(found[0]) if found else None
        if guess == self.secret:
            return Observation(reward=1.0, done=True, metadata={"guesses": self.guesses})
        said = answer_guess(guess, self.secret, feedback=self.feedback)
        return Observation(messages=said, reward=0.0, done=self.guesses == GUESSES)

    def state_dict(self) -> int:
        """The guesses so far."""
        return self.guesses

    def load_state_dict(self, state: int) -> None:
        """Goes on after so many guesses."""
        self.guesses = state


def answer_guess(guess: int | None, secret: int, *, feedback: bool) -> str:
    """What the game says to a guess that is wrong."""
    if guess is None:
        return "Say a number."
    return ("higher" if secret > guess else "lower") if feedback else "wrong"


def make_rows(*, size: int, seed: int, feedback: bool = True) -> list[Row]:
    """`size` games. Row i depends on (seed, i) alone."""
    rows = []
    for index in range(size):
        draw = Random(f"guess/{seed}/{index}")
        first = 10 * draw.randint(10, 998)
        question = f"Guess my number from {first} to {first + COUNT - 1}."
        # an empty system turn, in place of the long one that some templates write
        prompt = [{"role": "system", "content": ""}, {"role": "user", "content": question}]
        answer = str(draw.randrange(first, first + COUNT))
        rows.append({"prompt": prompt, "first": first, "answer": answer, "feedback": feedback})
    return rows


def make_examples(*, size: int, seed: int, feedback: bool = True) -> list[Row]:
    """Games for [sft], each with guesses until the number is found or none is left."""
    games = []
    for index, row in enumerate(make_rows(size=size, seed=seed, feedback=feedback)):
        draw, secret, low = Random(f"play/{seed}/{index}"), int(row["answer"]), row["first"]
        high, messages = low + COUNT - 1, [*row["prompt"]]
        for _ in range(GUESSES):
            guess = draw.randint(low, high)
            said = answer_guess(guess, secret, feedback=feedback)
            messages += {"role": "assistant", "content": str(guess)}, {"role": "user", "content": said}
            if guess == secret:
                break
            if feedback and index % 2 == 0:
                low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
        games.append({"messages": messages[:-1]})
    return games
