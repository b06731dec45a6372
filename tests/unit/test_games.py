"""Games of gymnasium and reasoning-gym, played with what a model would say."""

import json
from typing import Any

from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer

from rollouts.environments.adapters.game_rows import begin_game, compute_seed
from rollouts.environments.adapters.gymnasium_games import open_gymnasium
from rollouts.environments.adapters.reasoning_gym_games import open_reasoning_gym
from rollouts.environments.protocol import Turn
from tests.support.text_tables import cases
from tests.unit.chat_tokenizers import turn

ROW = {"prompt": "Reach G.", "prompt_id": "row-1", "epoch": 0}


def say(game, text):
    """What a game answers: text, or its text, the reward, whether it is over, and metadata."""
    seen = game.step(Turn(message=turn("assistant", text), text=f"<think>…{text}"))
    return seen if isinstance(seen, str) else (seen.messages, seen.reward, seen.done, seen.metadata)


def open_toy(env_id, **options):
    return open_gymnasium(env_id, **{"render": lambda seen, info, env: f"{seen}", "act": int, **options})


def test_a_lake_is_crossed_step_by_step():
    game = open_toy("FrozenLake-v1", act=["left", "down", "right", "up"].index, is_slippery=False)(ROW)
    assert game.reset() == [turn("user", "Reach G.\n\n0")]
    assert say(game, "dive") == "Error: 'dive' is not in list"
    seen = [say(game, move) for move in ["down", "down", "right", "right", "down", "right"]]
    assert (seen[1], seen[-1]) == (("8", 0.0, False, {}), ("15", 1.0, True, {}))
    game.close()
    short = open_toy("FrozenLake-v1", max_episode_steps=1)(ROW)
    short.reset()
    assert say(short, "0")[2:] == (True, {"truncated": True})


def test_the_samples_of_a_group_play_one_game_and_other_rows_another():
    cards, rows = open_toy("Blackjack-v1"), [{**ROW, "prompt_id": f"row-{number}"} for number in range(8)]
    first = [cards(row).reset() for row in rows]
    assert first == [cards(row).reset() for row in rows]
    assert len({message["content"] for (message,) in first}) > 4
    assert cards({"prompt": "Reach G.", "seed": compute_seed(ROW)}).reset() == cards(ROW).reset()
    assert compute_seed({**ROW, "epoch": 1}) != compute_seed(ROW) < 2**32


@cases("env_id: Taxi-v4 CliffWalking-v1 Blackjack-v1 FrozenLake-v1")
def test_a_stopped_game_goes_on_as_it_would_have(env_id):
    opened, said = open_toy(env_id), ["0", "1", "x", "9", "0"]
    stopped, resumed = opened(ROW), opened(ROW)
    stopped.reset()
    seen = [say(stopped, text) for text in said]
    assert seen[2].startswith("Error: invalid literal")
    assert seen[3].startswith("Error: 9 is not in Discrete(")
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert say(resumed, "1") == say(stopped, "1")


def test_a_prompt_of_messages_gets_the_game_in_its_last_turn():
    rules = [turn("system", "Be brief."), turn("user", "Play.")]
    assert begin_game({"prompt": rules}, "board") == [rules[0], turn("user", "Play.\n\nboard")]
    assert begin_game({"prompt": ""}, "board") == [turn("user", "board")]


# --- reasoning-gym ------------------------------------------------------------------------------------------

AGAIN = ("That is not right. Try again.", None, False, {})


@cases("""
dataset   | options                   | said                          | reward
chain_sum |                           | [" {answer}\\n"]              | 1.0
chain_sum |                           | ["no", "{answer}"]            | 0.5
chain_sum | discount = 0.1, tries = 2 | ["no", "{answer}"]            | 0.1
chain_sum |                           | ["no", "no", "no"]            | 0.0
chain_sum | read = "extract_answer"   | ["<answer>{answer}</answer>"] | 1.0
prime_factorization |                 | ["at which its scorer raises", "{answer}"] | 0.5
""")
def test_each_wrong_answer_takes_its_share_of_the_reward(dataset, options: dict, said: Any, reward: float):
    entry = create_dataset(dataset, size=1, seed=3)[0]
    if "read" in options:
        options["read"] = extract_answer
    row = json.loads(json.dumps({**entry, "prompt": entry["question"], "source_dataset": dataset}))
    game = open_reasoning_gym(**options)(row)
    *before, last = [say(game, text.format(**entry)) for text in said]
    assert before == [AGAIN] * len(before)
    assert last == ((), reward, True, {})
