"""Tools and environments for worker processes and for the event loop: good ones, and ones that spoil their
process. Those of environments do at `row["at"]`, a method, what `row["do"]` names.
"""

import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import Literal

import trio

from rollouts.environments.protocol import Observation
from rollouts.errors import EnvironmentFailed, ToolError
from rollouts.types import RewardResult

SPOILS = {
    "raise": lambda: {}["gone"],
    "fail": lambda: (_ for _ in ()).throw(EnvironmentFailed("the database is down")),
    "hang": lambda: time.sleep(1e6),
    "die": lambda: os._exit(3),
    "fork": os.fork,
    "allocate": lambda: bytearray(10 << 30),
    "print": lambda: print("x" * 2_000_000),
}

# --- tools ---


def calculate(a: int, operator: Literal["+", "/"], b: int = 2) -> float:
    """Calculates.

    Args:
        a: the first number
        b (int): the second number,
            which is not 0 for /
    """
    return a + b if operator == "+" else a / b


def spoil(how: str) -> str:
    return str(SPOILS[how]())


def child() -> str:
    subprocess.Popen(["sleep", "1000000"])
    return "started"


def long(chars: int) -> str:
    return "x" * chars


def odd() -> dict:
    return {"a": {1, 2}}


def refuse() -> str:
    print("a secret of the author")
    raise ToolError("failed", "not today; come back")


def nothing() -> None: ...


# --- environments ---


class Game:
    """Guess a number. Tells of its process in the score's note."""

    def __init__(self, row):
        self.row, self.calls, self.tools = row, 0, [self.look, self.spoil]
        self.meet("open")

    def meet(self, method):
        if self.row.get("at") == method:
            SPOILS[self.row["do"]]()

    def look(self, far: bool = False) -> dict:
        """Looks around."""
        self.calls += 1
        return {"calls": self.calls, "far": far}

    def spoil(self, how: str) -> str:
        return str(SPOILS[how]())

    def reset(self):
        self.meet("reset")
        return None if "answer" in self.row else "Guess!"

    def step(self, turn):
        self.meet("step")
        if "answer" in self.row:
            return ANSWERS[self.row["answer"]]
        self.calls += 1
        if turn.message["content"] == "7":
            return Observation(reward={"right": 1, "fast": 0.5}, done=True, metadata={"turns": (self.calls,)})
        return "Higher!"

    def score(self):
        self.meet("score")
        return RewardResult(self.calls, {"calls": self.calls}, str(os.getpid()))

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        return "loaded"

    def close(self):
        self.meet("close")


class Bare:
    """No more than there must be."""

    def __init__(self, row):
        pass

    def step(self, turn):
        return Observation(done=True)


ANSWERS = {
    "number": 7,
    "silent": Observation(),
    "nan": Observation(messages="a", reward=float("nan")),
    "bad_message": Observation(messages=[{"role": "user"}]),
    "metadata": Observation(messages="a", metadata={"a": {1}}),
}


class AsyncGame(Game):
    """The same in the event loop."""

    opened = closed = 0

    def __init__(self, row):
        super().__init__(row)
        AsyncGame.opened += 1

    async def step(self, turn):
        if (self.row.get("at"), self.row.get("do")) == ("step", "hang"):
            await trio.sleep_forever()
        return super().step(turn)

    async def close(self):
        AsyncGame.closed += 1
        await trio.lowlevel.checkpoint()
        super().close()


@asynccontextmanager
async def open_with_a_task(row):
    """An environment with a task of its own."""
    async with trio.open_nursery() as nursery:

        async def run():
            await trio.sleep(row["ends_s"])
            raise ValueError("the task failed")

        nursery.start_soon(run)
        try:
            yield (game := AsyncGame(row))
        finally:
            await game.close()
            nursery.cancel_scope.cancel()


async def open_async(row):
    return AsyncGame(row)


def open_async_by_a_plain_function(row):
    return AsyncGame(row)


def open_that_changes_directory(row):
    os.chdir("/")
    return Game(row)


def open_with_a_program(row):
    game = Game(row)
    game.program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    game.close = game.program.communicate
    return game
