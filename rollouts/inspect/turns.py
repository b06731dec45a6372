"""A trajectory of many turns as a person reads it."""

from rollouts.inspect.record import count_of
from rollouts.inspect.tokens import SPLIT
from rollouts.metrics.jsonl import Row
from rollouts.types import ChatMessage, encode_json


def list_turns(row: Row) -> list[dict[str, str]]:
    """Each message of a trajectory's row of samples.jsonl as `said`, in brackets who says it with what the
    record knows of it, and `text`: thinking, content and tool calls. What has no `said` is a line where a
    segment begins.

    The turns of the record are the last messages of the assistant: a prompt may hold others before them.
    """
    messages: list[ChatMessage] = row["messages"]
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    numbered = reversed([*enumerate(row["trajectory"]["turns"], 1)])
    turns = dict(zip(reversed(answers), numbered, strict=False))
    shown: list[dict[str, str]] = []
    segment, calls = 0, []
    for index, message in enumerate(messages):
        said = [message["role"], message.get("name", "")]
        if index in turns:
            number, turn = turns[index]
            if turn.get("segment", 0) > segment:
                segment = turn["segment"]
                shown.append({"said": "", "text": SPLIT.format(segment + 1)})
            said += [f"turn {number}", count_of(turn["tokens"], "token")]
            rewards = {"reward": turn.get("reward"), **turn.get("rewards", {})}
            said += [f"{name} {value:.3g}" for name, value in rewards.items() if value]
            calls = [*turn.get("calls", ())]
        elif calls:
            call = calls.pop(0)
            said[1:] = [call["name"], call["outcome"].removeprefix("ok")]
        thinking = message.get("reasoning_content")
        texts = [f"(thinks) {thinking}" if thinking else "", message["content"]]
        called = [call["function"] for call in message.get("tool_calls", ())]
        texts += [f"calls {one['name']} {encode_json(one['arguments'])}" for one in called]
        who = " · ".join(filter(None, said))
        shown.append({"said": f"[{who}] ", "text": "\n".join(filter(None, texts))})
    return shown
