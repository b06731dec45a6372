"""A task that a model over bytes learns in some dozen steps of SFT: it calls `multiply` once or twice, with
any two digits, and says a number.

The calls of every third group wait for a weight update: those groups go on with the next weights, whatever
the machine's speed. They are never more than a batch, so the batches before that update can do without them.
"""

import json
import random
from contextvars import ContextVar
from typing import Any

import trio

from rollouts.types import Sample

Row = dict[str, Any]
WAITS = 3  # of so many groups in a row one waits
GROUP = ContextVar[int]("group")  # of the trajectory that calls


class Updates:
    """What the engines serve, and since when groups are under way. Told by the program that runs the task."""

    def __init__(self):
        self.version = 0  # that all engines serve
        self.launched: dict[int, int] = {}  # groups, and the version at their launch
        self._changed = trio.lowlevel.ParkingLot()

    def publish(self, version: int):
        self.version = version
        self._changed.unpark_all()

    async def wait_since_launch(self, group: int):
        """Returns when the engines have been updated since the launch of the group."""
        while self.version == self.launched[group]:
            await self._changed.park()


UPDATES = Updates()


async def multiply(a: int, b: int) -> int:
    """The product of two whole numbers."""
    if GROUP.get() % WAITS == 0:
        await UPDATES.wait_since_launch(GROUP.get())
    return a * b


def count_turns(sample: Sample) -> float:
    """A reward: how many turns the model had."""
    return float(sum(message["role"] == "assistant" for message in sample.metadata["messages"]))


def make_rows(*, size: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    return [{"prompt": f"multiply {draw.randint(10, 99)} {draw.randint(10, 99)}"} for _ in range(size)]


def make_examples(*, size: int, seed: int) -> list[Row]:
    """Conversations with one call, or two."""
    draw = random.Random(seed)
    examples = []
    for row in make_rows(size=size, seed=seed):
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(draw.randint(1, 2)):
            a, b = draw.randint(1, 9), draw.randint(1, 9)
            call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
            messages += [
                {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
                {"role": "user", "content": str(a * b)},
            ]
        messages.append({"role": "assistant", "content": str(draw.randint(1, 81))})
        examples.append({"messages": messages})
    return examples
