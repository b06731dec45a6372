"""A trajectory of several turns: limits, rewards, tools, and what a stop leaves to go on from."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.config.tables import RolloutConfig
from rollouts.environments.episode import OpenWorld, make_agent_generate, make_formats
from rollouts.environments.protocol import Observation, Tool, World
from rollouts.errors import EnvironmentFailed, NotEnoughSamples, ToolError, TrajectoryLeftOut
from rollouts.generation.samples import TRAJECTORY
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import ChatMessage, RewardResult, Sample, SamplingParams, Status
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer
from tests.support.text_tables import cases
from tests.unit.manager_runs import ROWS, make_run

SAMPLING = SamplingParams(max_new_tokens=40, stop_token_ids=(FAKE_END,), seed=1)
NAMING_TOOLS = [{**row, "prompt": f"Use slow or break. {row['prompt']}"} for row in ROWS]
SAMPLE = Sample(id="g00000000-s000", prompt="Use slow.", group_index=0, metadata={"answer": "7"})


def read_turn(text: str) -> Mapping[str, Any]:
    """A call is `name(argument)`, several stand side by side; the rest is content."""
    text = text.removesuffix("<|end|>")
    if text.count("(") != text.count(")"):
        raise ValueError("a bracket is open")
    calls = [part.split("(") for part in text.split(")") if "(" in part]
    return {
        "content": "" if calls else text,
        "tool_calls": [{"function": {"name": name, "arguments": {"x": x}}} for name, x in calls],
    }


def read(token_ids: np.ndarray) -> str:
    """The text without special tokens."""
    return FakeTokenizer().decode(token_ids.tolist())


def make_tool(name: str, call) -> Tool:
    schema = {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    return Tool(name, schema, call)


async def slow(arguments) -> str:
    await trio.sleep(float(arguments["x"]))
    return f"slept {arguments['x']}"


async def break_(arguments) -> str:
    raise ToolError("failed", "it broke")


TOOLS = (make_tool("slow", slow), make_tool("break", break_))


def make_game(counts: Counter[str], *, stateful: bool = True, delay_s: float = 0.0) -> World:
    """Says "n" until the model says "end"; each turn is worth 0.5, the end 1."""
    turns = [0]

    async def reset():
        await trio.sleep(delay_s)

    async def step(turn):
        await trio.sleep(delay_s)
        if turn.text == "fail":
            raise EnvironmentFailed("it fell down")
        turns[0] += 1
        reward, done = RewardResult(0.5, {"half": 0.5}), turn.text == "end"
        messages = [ChatMessage(role="user", content="n")]
        return Observation(messages=messages, reward=reward, done=done, metadata={"turn": turns[0]})

    async def score():
        return RewardResult(1.0, {"won": 1.0})

    async def state():
        return turns[0] if stateful else None

    async def restore(state):
        counts["restored"] += 1
        turns[0] = state

    return World([], reset, step, score, state, restore)


def open_games(counts: Counter[str], **options) -> OpenWorld:
    @asynccontextmanager
    async def open_game(row):
        counts["opened"] += 1
        try:
            yield make_game(counts, **options)
        finally:
            counts["closed"] += 1

    return open_game


def script(*turns: str, token_s: float = 0.0):
    """Turn k of every trajectory says turns[k], or goes on with the rest of it; the last repeats."""

    def answer(request):
        name, _, done = request.request_id.partition("@")
        turn = int(name.partition("#")[2] or 0)
        return ScriptedReply(turns[min(turn, len(turns) - 1)][int(done or 0) :], token_s)

    return answer


def make_generate(*, world: OpenWorld | None = None, tools=TOOLS, **settings) -> Any:
    formats = make_formats(FakeTokenizer(), read_turn=read_turn)  # type: ignore[arg-type]
    options = {} if world is None else {"open_world": world}
    return make_agent_generate(formats, RolloutConfig(**settings), tools=tools, **options)


async def play(*turns: str, **options) -> Sample:
    engine = ScriptedEngine(script(*turns))
    (segment,) = await make_generate(**options)(SAMPLE, engine, SAMPLING)
    return segment


async def test_a_tool_answers_the_model_until_it_calls_no_more(autojump_clock):
    sample = await play("slow(2)", "done", tools=TOOLS[:1])
    assert read(sample.tokens) == "user\nUse slow.assistant\nslow(2)user\nslept 2assistant\ndone"
    assert read(sample.tokens[sample.loss_mask]) == "slow(2)done"
    assert sample.response == "done"
    assert sample.status is Status.COMPLETED
    assert sample.reward is None, "the config's reward function gives it"
    record = sample.metadata[TRAJECTORY]
    assert record["end"] == "done"
    assert record["time/tools"] == 2.0
    assert record["turns"][0]["calls"] == [{"name": "slow", "outcome": "ok", "time/call": 2.0}]


async def test_calls_of_a_turn_run_side_by_side_and_answer_in_their_order(autojump_clock):
    began = trio.current_time()
    prompt = Sample(id="x", prompt="Use slow and break.")
    engine = ScriptedEngine(script("slow(3)break(1)none(1)slow(1)", "done"))
    (sample,) = await make_generate()(prompt, engine, SAMPLING)
    assert trio.current_time() - began == 3.0
    said = [one["content"] for one in sample.metadata["messages"][2:-1]]
    assert said[0] == "slept 3"
    assert said[1].startswith("Error: ") and "it broke" in said[1]
    assert "there is no tool 'none'" in said[2]
    assert said[3] == "slept 1"
    outcomes = [call["outcome"] for call in sample.metadata[TRAJECTORY]["turns"][0]["calls"]]
    assert outcomes == ["ok", "failed", "unknown", "ok"]


async def test_a_turn_that_cannot_be_read_is_answered_in_words_and_counted(autojump_clock):
    sample = await play("slow(2", "done", tools=TOOLS[:1])
    messages = sample.metadata["messages"]
    assert messages[1]["content"] == "slow(2"
    assert messages[2]["content"].startswith("Error: the tool call could not be read: a bracket is open")
    assert sample.metadata[TRAJECTORY]["turns"][0]["calls"][0]["outcome"] == "unreadable"


async def test_an_environment_rewards_turns_and_scores_the_end():
    counts = Counter()
    sample = await play("a", "b", "end", world=open_games(counts), tools=())
    assert counts == {"opened": 1, "closed": 1}
    assert sample.reward == 2.5
    assert sample.rewards == {"half": 1.5, "won": 1.0}
    rewards = sample.turn_rewards[sample.turn_rewards != 0]
    assert rewards.tolist() == [0.5, 0.5, 1.5], "the score stands at the last turn"
    ends = np.flatnonzero(sample.turn_rewards)
    assert (sample.tokens[ends] == FAKE_END).all()
    assert [turn["metadata"] for turn in sample.metadata[TRAJECTORY]["turns"]] == [
        {"turn": 1},
        {"turn": 2},
        {"turn": 3},
    ]


@cases("""
end        | turns     | settings                   | words
turns      | a         | max_turns = 3              | aaa
tool_calls | slow(0)   | max_tool_calls = 2         | slow(0)slow(0)slow(0)
turns      | slow(0)   | max_turns = 2              | slow(0)slow(0)
tokens     | a         | max_trajectory_tokens = 60 | aa
time       | a slow(9) | trajectory_timeout_s = 5.0 | aslow(9)
""")
async def test_each_limit_ends_a_trajectory_with_a_name_of_its_own(
    end, turns, settings: dict, words, autojump_clock
):
    counts = Counter()
    said, options = turns.split(), {"world": open_games(counts), "tools": TOOLS[:1], **settings}
    sample = await play(*said, **options)
    assert sample.metadata[TRAJECTORY]["end"] == end
    assert sample.status is Status.TRUNCATED
    assert read(sample.tokens[sample.loss_mask]) == words
    assert sample.metadata[TRAJECTORY]["trains"]
    alone = await play(*said, **options, at_limit={end: "reward"})
    assert not alone.metadata[TRAJECTORY]["trains"]
    with pytest.raises(TrajectoryLeftOut, match=f"at_limit.{end} = 'drop' leaves it out"):
        await play(*said, **options, at_limit={end: "drop"})
    assert counts["opened"] == counts["closed"] == 3


async def test_an_answer_that_max_new_tokens_cut_ends_a_trajectory_without_an_environment():
    sample = await play(39 * "a" + "slow(1)", tools=TOOLS[:1])
    assert sample.metadata[TRAJECTORY]["end"] == "tokens"
    assert sample.response_length == 40


async def test_an_environment_that_fails_is_closed_and_named():
    counts = Counter()
    with pytest.raises(EnvironmentFailed, match="it fell down"):
        await play("a", "fail", world=open_games(counts), tools=())
    assert counts == {"opened": 1, "closed": 1}


# --- a manager, stops and updates ---------------------------------------------------------------------------


def rolls(seed: int):
    """A script of random turns, some of which end the game, call a tool, or fail."""
    said = ("a", "bb", "slow(1)", "break(1)", "slow(", "end", "end", "fail", "slow(1)slow(2)")

    def answer(request):
        name, _, done = request.request_id.partition("@")
        draw = np.random.default_rng([seed, *name.encode()])
        chosen = said[draw.integers(len(said))]
        if draw.random() < 0.02:
            return ScriptedReply(chosen, finish="length")
        return ScriptedReply(chosen[int(done or 0) :], float(draw.random() * 0.2))

    return answer


async def run_schedule(seed: int) -> Counter[str]:
    """A few batches with weight updates, stops, saves and cancellations at random moments."""
    draw, counts = np.random.default_rng(seed), Counter[str]()
    engine, staleness = ScriptedEngine(rolls(seed)), int(draw.integers(3))
    world = open_games(counts, stateful=bool(draw.integers(2)), delay_s=float(draw.integers(2)) * 0.5)
    settings = {
        "max_turns": 4,
        "over_sampling": 1.5,
        "max_failed_fraction": 1.0,
        "max_attempts": 50,
        "at_limit": {"turns": ("train", "reward", "drop")[draw.integers(3)]},
    }
    make = partial(
        make_run, rows=NAMING_TOOLS, engine=engine, generate=make_generate(world=world, **settings),
        reward=None, sampling=SAMPLING, num_prompts=1, samples_per_prompt=3, max_staleness=staleness,
        **settings,
    )  # fmt: skip
    run = make()

    async def disturb():
        while True:
            await trio.sleep(float(draw.random() * 2))
            await engine.pause(("abort", "wait", "keep")[draw.integers(3)])
            await trio.sleep(0.1)
            await engine.resume()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(disturb)
        for _ in range(2):
            with trio.move_on_after(float(draw.random() * 8) if draw.random() < 0.4 else math.inf):
                try:
                    batch = await run.manager.generate_batch()
                except NotEnoughSamples:
                    counts["given up"] += 1
                else:
                    counts["trained"] += len(batch)
                    run.advance(run.version[0] + 1)
            assert counts["opened"] == counts["closed"], "an environment is open"
            run.manager.check_ledger()
            if draw.random() < 0.5:  # killed and resumed
                run = make(state=run.save(), version=run.version[0])
        nursery.cancel_scope.cancel()
    return counts


def test_a_thousand_random_schedules_lose_no_prompt_and_leave_no_environment_open():
    total = Counter()
    for seed in range(1000):
        total += trio.run(run_schedule, seed, clock=trio.testing.MockClock(autojump_threshold=0))
    assert total["trained"] > 2000, total
    assert total["restored"] > 100, total
    assert total["given up"] < 50, total
