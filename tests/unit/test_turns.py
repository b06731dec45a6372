"""Trajectories of several turns without an event loop are those of an episode with the same completions."""

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from rollouts.config.rollout import RolloutConfig
from rollouts.environments.episode import make_agent_generate, make_formats
from rollouts.environments.protocol import Observation
from rollouts.environments.tools import make_tool
from rollouts.environments.turns import (
    create_multiturn_rollout,
    execute_tools,
    extract_tool_calls,
    generate_conversation_turn,
)
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import Sample, SamplingParams
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer
from tests.support.text_tables import cases
from tests.unit.program_runs import read_calls
from tests.unit.test_trajectories import complete

SAMPLING = SamplingParams(max_new_tokens=80, stop_token_ids=(FAKE_END,), seed=1)
SAMPLE = Sample(id="g00000000-s000", prompt="You may divide.", group_index=0, metadata={"answer": "3"})


def divide(a: int, b: int) -> float:
    """Divides."""
    return a / b


TOOLS = (make_tool(divide),)
execute = partial(execute_tools, tools=[divide])


MAKE_FORM = make_formats(FakeTokenizer(), read_turn=read_calls)  # type: ignore[arg-type]


def answer_step(turn):
    """Asks again until the model says "end"; a turn is worth its number of letters."""
    reward = {"letters": len(turn.text)}
    return Observation(messages="Go on.", reward=reward, done=turn.text == "end", metadata={"n": 1})


async def call(method, *arguments):
    return answer_step(*arguments) if method == "step" else None


@asynccontextmanager
async def open_world(row):
    yield SimpleNamespace(tools=(), call=call)


# what the model says, turn by turn
@cases("""
texts                                               | settings                   | end
3                                                   |                            | done
divide{"a": 6, "b": 2}divide{"a": 6, "b": 0} & 3    |                            | done
divide{"a": "x", "b": 2}multiply{} & divide{ & 3    |                            | done
divide{"a": 6, "b": 2} & divide{"a": 6, "b": 2}     | max_turns = 2              | turns
divide{"a": 6, "b": 2} & divide{"a": 6, "b": 2} & divide{"a": 6, "b": 2} | max_tool_calls = 2 | tool_calls
divide{}                                            | max_trajectory_tokens = 40 | tokens
a text that is longer than the eighty tokens which the sampling allows, so it is cut | | tokens
no & divide{"a": 6, "b": 2} & end                   |                            | done
no & no & no                                        | max_turns = 3              | turns
""")
async def test_a_rollout_is_the_episode_of_the_same_completions(texts, settings: dict, end, autojump_clock):
    said = texts.split(" & ")
    engine = ScriptedEngine(lambda request: ScriptedReply(said[int(request.request_id[15:] or 0)]))
    exchanges = []

    async def generate(request):
        exchanges.append((request, await engine.generate(request)))
        return exchanges[-1][1]

    def repeat(requests):
        request, completion = exchanges.pop(0)
        assert repr(requests) == repr([request])
        return [completion]

    config, has_world = RolloutConfig(**settings), said[0] == "no"
    options = {"open_world": open_world} if has_world else {}
    play = make_agent_generate(MAKE_FORM, config, tools=TOOLS, **options)
    episode = await play(SAMPLE, SimpleNamespace(generate=generate, features=engine.features), SAMPLING)
    answer = answer_step if has_world else None
    rollout = create_multiturn_rollout(
        SAMPLE, repeat, MAKE_FORM(TOOLS), SAMPLING, config=config, tool_executor=execute, step=answer
    )
    assert repr([*rollout]) == repr([*episode])
    assert rollout[-1].metadata["trajectory"]["end"] == end
    assert not exchanges


def say(text):
    """A `complete` that says the text."""
    return lambda requests: [complete([*text.encode(), FAKE_END], np.random.default_rng(0), ended=True)]


def test_a_stop_condition_ends_a_trajectory_before_its_calls_are_answered():
    (sample,) = create_multiturn_rollout(
        SAMPLE,
        say("divide{}"),
        replace(MAKE_FORM(TOOLS), read_turn=None),
        SAMPLING,
        tool_parser=read_calls,
        tool_executor=lambda calls: pytest.fail("it ran a tool"),
        stop_condition=lambda turn: extract_tool_calls(turn.message)[0]["function"]["name"] == "divide",
    )
    assert sample.response == "divide{}"


def test_a_conversation_by_hand_holds_every_token():
    form = MAKE_FORM(TOOLS)
    conversation = form.begin([{"role": "user", "content": "You may divide."}])
    call = say('divide{"a": 6, "b": 4}')
    conversation, turn = generate_conversation_turn(call, form, conversation, SAMPLING)
    (result,) = execute(extract_tool_calls(turn.message))
    conversation = form.extend(conversation, [result.message])
    conversation, _ = generate_conversation_turn(say("1.5"), form, conversation, SAMPLING)
    text = bytes(token for token in conversation.tokens if token < 256).decode()
    assert text == 'user\nYou may divide.assistant\ndivide{"a": 6, "b": 4}user\n1.5assistant\n1.5'
