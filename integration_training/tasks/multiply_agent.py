"""The problems of the task multiply for an agent of one's own, which speaks to whatever serves OpenAI's API:

[rl.rollout]
agent = "integration_training.tasks.multiply_agent:main"
response_template = "hermes"
reward = "integration_training.tasks.arithmetic:exact_answer"
"""

import json
from typing import Any

from openai import OpenAI

NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS: Any = [{"type": "function", "function": {"name": "multiply", "parameters": PARAMETERS}}]


def main(row: dict[str, Any]) -> None:
    """Asks, and answers calls, until a turn has none."""
    client, messages = OpenAI(), list(row["prompt"])
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            if call.type == "function":
                content = multiply(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not message.tool_calls:
            break


def multiply(arguments: str) -> str:
    """What the model reads as the result of a call."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError):
        return "multiply takes two whole numbers, a and b"
