"""Tools and environments for worker processes and for the event loop: good ones, and ones that spoil their
process. An environment does at `row["at"]`, a method, what `row["do"]` names.
"""

import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import Literal

import trio

from rollouts.environments.protocol import Observation, Turn
from rollouts.environments.tools import call_tools
from rollouts.errors import EnvironmentFailed, ToolError
from rollouts.types import RewardResult


def fail():
    raise EnvironmentFailed("the database is down")


SPOILS = {
    "raise": lambda: {}["gone"],
    "fail": fail,
    "hang": lambda: time.sleep(1e6),
    "die": lambda: os._exit(3),
    "fork": os.fork,
    "allocate": lambda: bytearray(10 << 30),
    "print": lambda: print("x" * 2_000_000),
    "child": lambda: subprocess.Popen(["sleep", "1000000"]),
    "long": lambda: "x" * 10_485_760,
    "set": lambda: {"a": {1, 2}},
    "half": lambda: {"said": "ü\ud800"},
    "none": lambda: None,
}


async def use(tools, calls, timeout_s=30):
    """Outcomes and contents of the messages."""
    calls = [{"id": name, "function": {"name": name, "arguments": given}} for name, given in calls]
    results = await call_tools(calls, tools, timeout_s=timeout_s)
    assert [one.message["tool_call_id"] for one in results] == [call["id"] for call in calls]
    return [(one.outcome, one.message["content"]) for one in results]


# --- tools ---


def calculate(a: int, operator: Literal["+", "/"], b: int = 2) -> float:
    """Calculates.

    Args:
        a: the first number
        b (int): the second number,
            which is not 0 for /
    """
    return a + b if operator == "+" else a / b


def spoil(how: str):
    return SPOILS[how]()


def refuse():
    print("a secret of the author")
    raise ToolError("failed", "not today; come back")


# --- environments ---


def say(text):
    return Turn(message={"role": "assistant", "content": text}, text=text)


async def play(open_one, row):
    async with open_one(row) as world:
        await world.call("reset")
        await world.call("step", say("7"))
        await world.call("score")


class Game:
    """Guess a number. Its score's note tells of its process."""

    def __init__(self, row):
        self.row, self.calls, self.tools = row, 0, [self.look, spoil]
        self.meet("open")

    def meet(self, method):
        if self.row.get("at") == method:
            SPOILS[self.row["do"]]()

    def look(self, far: bool = False) -> dict:
        """Looks around."""
        self.calls += 1
        return {"calls": self.calls, "far": far}

    def reset(self):
        self.meet("reset")
        return None if "answer" in self.row else "Guess!"

    def step(self, turn):
        self.meet("step")
        if turn.message["content"] == "3":
            return "Higher!"
        right = Observation(reward={"right": 1, "fast": 0.5}, done=True, metadata={"turns": (1,)})
        return ANSWERS.get(self.row.get("answer"), right)

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
        if self.row.get("do") == "hang":
            await trio.sleep_forever()
        return super().step(turn)

    async def close(self):
        AsyncGame.closed += 1
        await trio.lowlevel.checkpoint()
        super().close()


async def open_async(row):
    return AsyncGame(row)


def open_async_by_a_plain_function(row):
    return AsyncGame(row)


@asynccontextmanager
async def open_with_a_task(row):
    """An environment with a task of its own, which fails after a while."""
    async with trio.open_nursery() as nursery:

        async def run():
            await trio.sleep(3)
            raise ValueError("the task failed")

        nursery.start_soon(run)
        try:
            yield (game := AsyncGame(row))
        finally:
            await game.close()
            nursery.cancel_scope.cancel()


def open_that_changes_directory(row):
    os.chdir("/")
    return Game(row)


def open_with_a_program(row):
    game = Game(row)
    game.close = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).communicate
    return game
