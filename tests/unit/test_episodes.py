"""A trajectory of several turns: limits, rewards, tools, and what a stop leaves to go on from; aborts
do not reach its generate function, and what it has noted of its progress is not lost.
"""

import math
import re
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.config.rollout import RolloutConfig
from rollouts.environments.episode import make_agent_generate, make_formats
from rollouts.environments.protocol import Observation, Tool, World
from rollouts.errors import EnvironmentFailed, NotEnoughSamples, ToolError, TrajectoryLeftOut
from rollouts.generation.collector import STOP_S
from rollouts.generation.continuing import ContinuingEngine, note_progress
from rollouts.generation.generate import append_completion
from rollouts.generation.group import Member
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import (
    TRAJECTORY,
    ChatMessage,
    GenerateRequest,
    RewardResult,
    Sample,
    SamplingParams,
    Status,
)
from tests.support.fake_tokenizer import FAKE_END, FakeTokenizer
from tests.support.text_tables import cases
from tests.unit.manager_runs import ROWS, make_run, say

SAMPLING = SamplingParams(max_new_tokens=40, stop_token_ids=(FAKE_END,), seed=1)
NAMING_TOOLS = [{**row, "prompt": f"Use slow or break. {row['prompt']}"} for row in ROWS]
SAMPLE = Sample(id="g00000000-s000", prompt="Use slow.", group_index=0, metadata={"answer": "7"})


def read_turn(text):
    """A call is `name(argument)`, several stand side by side; the rest is content."""
    text = text.removesuffix("<|end|>")
    if text.count("(") != text.count(")"):
        raise ValueError("a bracket is open")
    calls = [part.split("(") for part in text.split(")") if "(" in part]
    return {
        "content": "" if calls else text,
        "tool_calls": [{"function": {"name": name, "arguments": {"x": x}}} for name, x in calls],
    }


def read(token_ids):
    """The text without special tokens."""
    return FakeTokenizer().decode(token_ids.tolist())


def make_tool(name, call):
    function = {"name": name, "description": "", "parameters": {}}
    return Tool(name, {"type": "function", "function": function}, call)


async def slow(arguments):
    await trio.sleep(float(arguments["x"]))
    return f"slept {arguments['x']}"


async def break_(arguments):
    raise ToolError("failed", "it broke")


TOOLS = (make_tool("slow", slow), make_tool("break", break_))


def make_game(counts, *, stateful=True, delay_s=0.0):
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

    calls = {"step": step, "score": score, "state_dict": state, "load_state_dict": restore}
    return World([], lambda method, *of: {"reset": reset, **calls}[method](*of))


def open_games(counts, **options):
    @asynccontextmanager
    async def open_game(row):
        counts["opened"] += 1
        try:
            yield make_game(counts, **options)
        finally:
            counts["closed"] += 1

    return open_game


def script(*turns, token_s=0.0):
    """Turn k of every trajectory says turns[k], or goes on with the rest of it; the last repeats."""

    def answer(request):
        name, _, done = request.request_id.partition("@")
        turn = int(name.partition("#")[2] or 0)
        return ScriptedReply(turns[min(turn, len(turns) - 1)][int(done or 0) :], token_s)

    return answer


def make_generate(*, world=None, tools=TOOLS, **settings):
    formats = make_formats(FakeTokenizer(), read_turn=read_turn)  # type: ignore[arg-type]
    options = {} if world is None else {"open_world": world}
    return make_agent_generate(formats, RolloutConfig(**settings), tools=tools, **options)


async def play(*turns, **options):
    engine = ScriptedEngine(script(*turns))
    (segment,) = await make_generate(**options)(SAMPLE, engine, SAMPLING)
    return segment


async def test_a_tool_answers_the_model_until_it_calls_no_more(autojump_clock):
    sample = await play("slow(2)", "done", tools=TOOLS[:1])
    assert read(sample.tokens) == "user\nUse slow.assistant\nslow(2)user\nslept 2assistant\ndone"
    assert read(sample.tokens[sample.loss_mask]) == "slow(2)done"
    # the config's reward function gives the reward
    assert (sample.response, sample.status, sample.reward) == ("done", Status.COMPLETED, None)
    record = sample.metadata[TRAJECTORY]
    assert (record["end"], record["time/tools"]) == ("done", 2.0)
    assert record["turns"][0]["calls"] == [{"name": "slow", "outcome": "ok", "time/call": 2.0}]


async def test_calls_of_a_turn_run_side_by_side_and_answer_in_their_order(autojump_clock):
    began = trio.current_time()
    prompt = Sample(id="x", prompt="Use slow and break.")
    engine = ScriptedEngine(script("slow(3)break(1)none(1)slow(1)", "done"))
    (sample,) = await make_generate()(prompt, engine, SAMPLING)
    assert trio.current_time() - began == 3.0
    said = "\n".join(one["content"] for one in sample.metadata["messages"][2:-1])
    assert re.fullmatch("slept 3\nError: .*it broke.*\n.*there is no tool 'none'.*\nslept 1", said)
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
    assert rewards.tolist() == [0.5, 0.5, 1.5]  # the score stands at the last turn
    ends = np.flatnonzero(sample.turn_rewards)
    assert (sample.tokens[ends] == FAKE_END).all()
    assert [turn["metadata"]["turn"] for turn in sample.metadata[TRAJECTORY]["turns"]] == [1, 2, 3]


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


def rolls(seed):
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


async def run_schedule(seed):
    """A few batches with weight updates, stops, saves and cancellations at random moments."""
    draw, counts = np.random.default_rng(seed), Counter[str]()
    engine, staleness = ScriptedEngine(rolls(seed)), int(draw.integers(3))
    world = open_games(counts, stateful=bool(draw.integers(2)), delay_s=float(draw.integers(2)) * 0.5)
    settings = {"max_turns": 4, "over_sampling": 1.5, "max_failed_fraction": 1.0, "max_attempts": 50}
    settings["at_limit"] = {"turns": ("train", "reward", "drop")[draw.integers(3)]}
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
            assert counts["opened"] == counts["closed"]  # else an environment is open
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


# --- aborts and progress ------------------------------------------------------------------------------------


FIRST = "g00000000-s000"
SLOW_S = 1000.0


class Play:
    """Two requests, with a tool between them that takes `tool_s` by group. Group 0 does not end when its
    request is aborted. `begun` has each call and from how many tokens it went on.
    """

    def __init__(self, *tool_s):
        self.tool_s, self.begun = tool_s, list[tuple[str, int]]()

    async def __call__(self, sample, engine, sampling):
        self.begun.append((sample.id, sample.response_length))
        for turn in range(int(sample.metadata.get("turns", 0)), 2):
            tokens = sample.tokens if turn else np.array([1, 2, 3])
            name = f"{sample.id}#{turn}"
            answer = await engine.generate(
                GenerateRequest(request_id=name, prompt_ids=tokens, sampling=sampling)
            )
            if answer.finish_reason == "abort":
                await trio.sleep(0 if sample.group_index else SLOW_S)
                return replace(sample, status=Status.ABORTED)
            done = sample.response_length
            sample = append_completion(sample, tokens, answer, FakeTokenizer(), done=done)
            if turn == 0:
                sample = replace(sample, metadata={**sample.metadata, "turns": 1})
                note_progress(sample)
                await trio.sleep(self.tool_s[sample.group_index or 0])
        return sample


def start(play, script=None, **options):
    options = {"num_prompts": 1, "max_staleness": 2, **options}
    return make_run(script or say(), generate=play, **options)


async def test_a_weight_update_that_aborts_does_not_reach_the_trajectory(autojump_clock):
    """Three tokens of 1 s, 5 s of a tool, three tokens; the abort comes after the first of the last three."""
    run = start(play := Play(5.0, 5.0))

    async def update():
        await trio.sleep(9.5)
        await run.engine.pause("abort")
        run.advance(1)
        await run.engine.resume()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(update)
        batch = await run.manager.generate_batch()
    assert sorted(play.begun) == [(sample.id, 0) for sample in batch.samples]  # each began once
    for sample in batch.samples:
        assert (sample.response, sample.status) == ("abab", Status.COMPLETED)
        assert sample.weight_versions[sample.loss_mask].tolist() == [0] * 4 + [1] * 2
    asked = [one for one in run.engine.requests if one.request_id.startswith(FIRST)]
    assert [one.request_id[len(FIRST) :] for one in asked] == ["#0", "#1", "#1@1"]
    assert asked[2].prompt_ids.tolist() == batch.samples[0].tokens[:-2].tolist()
    assert asked[2].sampling.max_new_tokens == 8 - 1


@cases("""
in_engine | after_s
no        | 0
yes       | 10
""")
async def test_a_trajectory_that_is_stopped_goes_on_from_what_it_noted(
    autojump_clock, in_engine: bool, after_s: float
):
    """Group 0 waits for a tool when the batch of group 1 is full; or for an answer, and does not end when
    that is aborted.
    """

    def token_s(name):
        slow = in_engine and name.startswith("g00000000") and "#1" in name and trio.current_time() < 7
        return 100.0 if slow else 1.0

    play = Play(0.0 if in_engine else SLOW_S, 0.0, 0.0)
    run = start(play, say(token_s=token_s), over_sampling=2.0)
    assert await run.take() == [1]
    assert trio.current_time() == 6 + after_s, f"{STOP_S} s if it does not end"
    held = run.manager.state_dict()["unfinished"][0]
    assert [one["partial"]["metadata"]["turns"] for one in held["members"]] == [1, 1]
    run.advance(1)
    del play.begun[:]
    assert await run.take() == [0]
    assert (FIRST, 3) in play.begun  # from its three tokens


async def test_a_snapshot_has_what_running_trajectories_noted(autojump_clock):
    run = start(Play(5.0, 5.0))
    async with run.manager.generating(), trio.open_nursery() as nursery:
        nursery.start_soon(run.take)
        await trio.sleep(2)
        assert run.manager.state_dict()["unfinished"] == []  # nothing is noted yet
        await trio.sleep(2)  # each waits for its tool
        state = run.save()
        nursery.cancel_scope.cancel()
    resumed = start(play := Play(5.0, 5.0), state=state)
    assert await resumed.take() == [0] and len(resumed.engine.requests) == 2
    assert [done for _, done in play.begun[:2]] == [3, 3]
    resumed.manager.check_ledger()


async def test_an_answer_that_is_aborted_at_its_last_token_is_whole():
    plan = make_run().manager._plan
    engine = ScriptedEngine(lambda request: ScriptedReply("ab", finish="abort"))
    member = Member(Sample(id=FIRST, prompt="p"))
    call = ContinuingEngine(plan._replace(engine=engine), member)
    request = GenerateRequest(
        request_id="x", prompt_ids=np.array([1]), sampling=SamplingParams(max_new_tokens=5)
    )
    answer = await call.generate(request)
    assert (len(answer.token_ids), answer.finish_reason, answer.request_id) == (5, "length", "x")
    assert [one.request_id for one in engine.requests] == ["x", "x@2", "x@4"]
    assert call.features is engine.features and await call.weight_version() == 0
    note_progress(member.pending)  # nobody waits for it
