"""A trajectory that a program plays, with a model that is scripted. Loads no asyncio."""

import json
import re

from rollouts.config.rollout import RolloutConfig
from rollouts.environments.episode import make_formats
from rollouts.environments.proxy import make_proxy_generate, open_proxy
from rollouts.testing.fakes import ScriptedEngine
from rollouts.types import Sample, SamplingParams
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer

SAMPLING = SamplingParams(max_new_tokens=200, stop_token_ids=(FAKE_END,), seed=1)
SAMPLE = Sample(id="g00000000-s000", prompt="Say €.", group_index=0, metadata={"answer": "7", "turns": 2})


def read_calls(text):
    """A call is `name{arguments}`, several stand side by side; the rest is content."""
    text, called = text.removesuffix("<|end|>"), r"([a-z_]+)(\{.*?\})"
    if text.count("{") != text.count("}"):
        raise ValueError("a bracket is open")
    calls = [{"function": {"name": name, "arguments": json.loads(x)}} for name, x in re.findall(called, text)]
    return {"content": re.sub(called, "", text), "tool_calls": calls}


def make_format(tools):
    return make_formats(FakeTokenizer(), read_turn=read_calls)(tools)


async def play(agent, engine=None, *, sample=SAMPLE, **settings):
    """What a program's trajectory gives."""
    async with open_proxy() as proxy:
        generate = make_proxy_generate(proxy, make_format, RolloutConfig(agent=agent, **settings))
        return await generate(sample, engine or ScriptedEngine(), SAMPLING)
