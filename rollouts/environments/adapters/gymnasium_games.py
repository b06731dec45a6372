"""Environments of gymnasium as games in text, one step a turn; the extra gymnasium.

A file that the config names, by environment = "lake.py:open_lake":

    MOVES = ("left", "down", "right", "up")

    def show(square: int, info: Mapping, env: Any) -> str:
        lake = "\n".join(b"".join(row).decode() for row in env.unwrapped.desc)
        return f"{lake}\nYou are in row {square // 4}, column {square % 4}."

    def read_move(text: str) -> int:
        word = text.strip().lower()
        if word not in MOVES:
            raise ValueError(f"answer with one word of {', '.join(MOVES)}")
        return MOVES.index(word)

    open_lake = open_gymnasium("FrozenLake-v1", render=show, act=read_move, is_slippery=False)

env.render() with render_mode="ansi" gives a text too, with the codes of a terminal's colours in it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rollouts.environments.adapters.game_rows import Row, begin_game, compute_seed
from rollouts.environments.protocol import Observation
from rollouts.types import ChatMessage


def open_gymnasium(
    env_id: str, *, render: Callable[..., str], act: Callable[[str], Any], **make_options: Any
) -> Callable[[Row], SimpleNamespace]:
    """A function from a row to a new game of `env_id`, made with make_options, such as max_episode_steps.

    render: from an observation, its info and the environment to what the model reads; the first follows the
    row's prompt, which may tell the rules. act: from what the model said to an action; raises ValueError, in
    words for the model, where it is none. Such a turn is no step, and rl.rollout.max_turns limits them.

    Each step's reward is its turn's. A game that gymnasium truncates ends with metadata {"truncated": true}.
    The seed is the row's `seed`, or follows from its prompt_id and epoch; a game that was stopped is played
    again from it, and must go the same way.
    """
    from gymnasium import make

    def open_game(row: Row) -> SimpleNamespace:
        env, said = make(env_id, **make_options), list[str]()

        def reset() -> list[ChatMessage]:
            observation, info = env.reset(seed=compute_seed(row))
            return begin_game(row, render(observation, info, env))

        def hear(text: str) -> Observation | str:
            said.append(text)
            try:
                action = act(text)
                if not env.action_space.contains(action):
                    raise ValueError(f"{action} is not in {env.action_space}")
            except ValueError as error:
                return f"Error: {error}"
            observation, reward, terminated, truncated, info = env.step(action)
            shown, ends = render(observation, info, env), {"truncated": True} if truncated else {}
            return Observation(
                messages=shown, reward=float(reward), done=terminated or truncated, metadata=ends
            )

        def load_state_dict(state: list[str]) -> None:
            reset()
            for text in state:
                hear(text)

        return SimpleNamespace(
            reset=reset,
            step=lambda turn: hear(turn.message["content"]),
            state_dict=lambda: said,
            load_state_dict=load_state_dict,
            close=env.close,
        )

    return open_game
