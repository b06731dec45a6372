"""The endpoint over a scripted engine that speaks the tokens of a chat template, and the openai SDK as its
client.
"""

import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import trio

import rollouts.environments
from rollouts.config.tables import RolloutConfig
from rollouts.environments.episode import Episode, make_formats
from rollouts.environments.proxy import OpenTrajectory, Proxy, open_proxy
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import Completion, GenerateRequest, Sample, SamplingParams
from tests.unit.chat_tokenizers import family_tokenizer

HERMES = json.loads(
    (Path(rollouts.environments.__file__).parent / "response_templates.json").read_text("utf-8")
)["hermes"]
TOKENIZER = family_tokenizer("qwen2_5")
END = int(TOKENIZER.convert_tokens_to_ids("<|im_end|>"))
SAMPLING = SamplingParams(max_new_tokens=200, stop_token_ids=(END,), seed=7)
ASK = [{"role": "user", "content": "Add."}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
        "strict": False,
    },
}


def call(a: int, b: int) -> str:
    """A turn of the model that calls, spaced as no JSON encoder would."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a":{a},  "b": {b}}}}}\n</tool_call>'


class Model:
    """An engine that says these texts in turn, over and over, one token for each byte; `given` is what it was
    asked and what it answered. A text that is an error is raised.
    """

    def __init__(self, *texts: str | Exception, token_s: float = 0.0) -> None:
        turns = itertools.cycle(texts)

        def script(request: GenerateRequest) -> ScriptedReply:
            text = next(turns)
            error = None if isinstance(text, str) else text
            return ScriptedReply("" if error else str(text), token_s, error=error)

        self.scripted = ScriptedEngine(script)
        self.given: list[tuple[GenerateRequest, Completion]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scripted, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await self.scripted.generate(request)
        ids = completion.token_ids.tolist()
        if ended := completion.finish_reason == "stop":
            ids = ids[:-1]  # the end token is not a byte
        ids = TOKENIZER.encode(bytes(ids).decode(errors="ignore"), add_special_tokens=False)
        stops = [place + 1 for place, one in enumerate(ids) if one in request.sampling.stop_token_ids]
        if stops:
            ids, reason = ids[: stops[0]], "stop"
        else:
            ids, reason = [*ids, *[END] * ended], completion.finish_reason
        arrays: Any = {
            name: getattr(completion, name)[: len(ids)] for name in ("log_probs", "weight_versions")
        }
        told = replace(completion, token_ids=np.asarray(ids, np.int64), finish_reason=reason, **arrays)
        self.given.append((request, told))
        return told


@dataclass
class Endpoint:
    """One trajectory, open at an endpoint."""

    url: str
    trajectory: OpenTrajectory
    proxy: Proxy

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"base_url": f"{self.url}/v1", "api_key": self.trajectory.key, "max_retries": 0} | options
        client = openai.AsyncOpenAI(**options)
        client._platform = "Linux"  # else it asks for it in a thread
        return client

    def samples(self) -> tuple[Sample, ...]:
        episode = self.trajectory.episode
        episode.node = episode.turns[-1].answer
        return episode.segments(self.trajectory.end)


@asynccontextmanager
async def open_endpoint(
    engine: Any, *, proxy: Proxy | None = None, make_format: Any = None, **settings: Any
) -> AsyncIterator[Endpoint]:
    """A trajectory at an endpoint, its own or the given one. Raises what ended it."""
    make_format = make_format or make_formats(TOKENIZER, read_turn=HERMES)
    record = {"restarts": 0, "resumed": 0, "tool_calls": 0, "tool_s": 0.0, "s": 0.0}
    fields: tuple[Any, ...] = (SAMPLING, Sample(id="x", prompt="?"), None, (), None, [], None, record)
    episode = Episode(make_format(()), RolloutConfig(**settings), engine, *fields, trio.current_time())
    opening: Callable[[], Any] = open_proxy if proxy is None else lambda: trio.open_nursery()
    async with opening() as opened:
        proxy = opened if proxy is None else proxy
        async with open_plain_nursery() as nursery:
            trajectory = OpenTrajectory(episode, make_format, nursery)
            number = str(len(proxy.trajectories))
            proxy.trajectories[number] = trajectory
            yield Endpoint(f"{proxy.url}/e/{number}", trajectory, proxy)
            proxy.trajectories[number] = None
        if trajectory.failure:
            raise trajectory.failure
