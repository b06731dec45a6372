"""An OpenEnv server of two games at a time, in a Python of its own; prints its port.

A number is guessed. 77 is answered after three seconds, 99 breaks the game.
"""

import socket
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Answer(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int = 0, episode_id: Any = None, *, most: int = 8, **rest: Any) -> Answer:
        self.secret = seed % most + 1
        return Answer(text=f"Guess a number up to {most}.")

    def step(self, action: Guess, timeout_s: Any = None, **rest: Any) -> Answer:
        if action.number == 77:
            time.sleep(3)
        if action.number == 99:
            raise RuntimeError("the game fell down")
        right = action.number == self.secret
        return Answer(text="right" if right else "wrong", done=right, reward=1.0 if right else None)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=2)
        # by default both are 20 s
        config = uvicorn.Config(app, log_level="error", ws_ping_interval=0.5, ws_ping_timeout=1.5)
        uvicorn.Server(config).run(sockets=[listener])
