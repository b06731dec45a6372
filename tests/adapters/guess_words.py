"""An environment of verifiers' v0 API, as a package of its own would have it: a letter is guessed."""

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **rest: Any) -> Any:
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
        return [vf.UserMessage(content="No. Again.")]


def load_environment(breaks: bool = False) -> vf.Environment:
    def is_right(completion: Any, answer: str) -> float:
        if breaks:
            raise RuntimeError("the judge is away")
        said = [message.content for message in completion if message.role == "assistant"]
        return float(said[-1] == answer) / len(said)

    rows = Dataset.from_list([{"question": f"After {a}?", "answer": b} for a, b in ("ab", "bc")])
    return Guess(dataset=rows, rubric=vf.Rubric([is_right]), max_turns=3, system_prompt="One letter.")
