"""Products of two numbers of two digits, which a small model cannot find in its head, and a tool that can.

    [rl.data]
    kind = "python"
    function = "integration_training.tasks.multiply:make_rows"
    size = 2000

    [rl.rollout]
    tools = ["integration_training.tasks.multiply:multiply"]
    response_template = "hermes"
    reward = "integration_training.tasks.arithmetic:exact_answer"

RL cannot find the form of a call by itself: `make_examples` are rows for [sft] in which every fourth problem
is answered with a call and the others with a guess, so that the policy has both to choose from.
"""

import json
from random import Random

from integration_training.tasks import Row, keep_mixed

__all__ = ["keep_mixed"]  # the filter of this task

SYSTEM = (
    "Answer with the product alone. The tool multiply(a, b) can be called so:"
    ' <tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
)


def multiply(a: int, b: int) -> int:
    """The product of two whole numbers."""
    return a * b


def make_rows(*, size: int, seed: int, tool: bool = True) -> list[Row]:
    """`size` problems with their answers; without `tool` the prompt does not speak of one. Row i depends on
    (seed, i) alone.
    """
    system, rows = {"role": "system", "content": SYSTEM if tool else SYSTEM.partition(".")[0] + "."}, []
    for index in range(size):
        draw = Random(f"multiply/{seed}/{index}")
        first, second = draw.randint(10, 99), draw.randint(10, 99)
        prompt = [system, {"role": "user", "content": f"{first} * {second}"}]
        rows.append({"prompt": prompt, "answer": str(first * second), "factors": [first, second]})
    return rows


def make_examples(*, size: int, seed: int, tool: bool = True) -> list[Row]:
    """Conversations for [sft]: one with a call and its result, then three that guess, and so on."""
    rows = []
    for index, row in enumerate(make_rows(size=size, seed=seed, tool=tool)):
        first, second = row["factors"]
        if tool and index % 4 == 0:
            call = json.dumps({"name": "multiply", "arguments": {"a": first, "b": second}})
            said = [f"<tool_call>{call}</tool_call>", row["answer"], row["answer"]]
        else:
            said = [str(max(100, first * second + Random(index).randint(-200, 200)))]
        turns = [
            {"role": role, "content": text}
            for role, text in zip(("assistant", "user", "assistant"), said, strict=False)
        ]
        rows.append({"messages": [*row["prompt"], *turns]})
    return rows
