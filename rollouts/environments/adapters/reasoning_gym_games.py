"""Problems of reasoning-gym with several tries; the extra reasoning-gym. Rows are those of a source of
kind = "reasoning_gym", each of which names its dataset.

A file that the config names, by environment = "sums.py:open_sums":

    open_sums = open_reasoning_gym(tries=3, discount=0.5)
"""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from rollouts.environments.adapters.game_rows import Row
from rollouts.environments.protocol import Observation, Turn


def open_reasoning_gym(
    *, tries: int = 3, discount: float = 0.5, read: Callable[[str], str | None] = str.strip
) -> Callable[[Row], SimpleNamespace]:
    """A function from a row to a game that ends with a right answer or after so many tries. Its reward is the
    last try's score, by the score_answer of the row's dataset, times `discount` for each try before.

    read: from what the model said to its answer; reasoning_gym.utils.extract_answer is another. An answer at
    which score_answer raises scores 0. Problems of arc_agi and rearc cannot be scored: their metadata does
    not survive JSON.
    """

    def open_game(row: Row) -> SimpleNamespace:
        from reasoning_gym.factory import get_score_answer_fn

        score_answer: Any = get_score_answer_fn(row["source_dataset"])
        rewards = [
            discount**tried for tried in reversed(range(tries))
        ]  # of a right answer, the next one last

        def step(turn: Turn) -> Observation:
            score, reward = 0.0, rewards.pop()
            with suppress(Exception):  # some take an answer apart as it comes
                score = score_answer(read(turn.message["content"]), row)
            if score == 1 or not rewards:
                return Observation(reward=score * reward, done=True)
            return Observation(messages="That is not right. Try again.")

        return SimpleNamespace(step=step)

    return open_game
