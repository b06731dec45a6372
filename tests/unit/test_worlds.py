"""Environments, in worker processes (real processes, real time) and in the event loop: the same life, and
whatever goes wrong is the failure of one trajectory, with everything closed.
"""

from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from rollouts.config.schema import RunConfig
from rollouts.environments.worlds import open_world
from rollouts.errors import EnvironmentFailed
from rollouts.preflight.findings import Findings
from rollouts.preflight.functions import load_functions, open_functions
from rollouts.rewards.workers import RaisedInWorker, name_function, open_workers
from rollouts.types import RewardResult
from tests.support.processes import find_descendants
from tests.support.text_tables import cases
from tests.unit import hostile_worlds
from tests.unit.hostile_worlds import AsyncGame, play, say, use

FILE = Path(__file__).with_name("hostile_worlds.py")
BOTH = cases("name: Game AsyncGame")


@asynccontextmanager
async def open_opener(name: str, *, timeout_s: float = 20, count: int = 4):
    """What opens the environments of a name of hostile_worlds.py, and its workers. Later all is closed."""
    before, options = find_descendants(), {"timeout_s": timeout_s}
    limits = {"count": count, "memory_bytes": 1 << 30, "module": "rollouts.environments.worker"}
    async with open_workers(**limits, **options) as workers:
        options |= {"request": name_function("environment", f"{FILE}:{name}"), "workers": workers}
        yield partial(open_world, opener=getattr(hostile_worlds, name), **options), workers
        assert workers.statistics()["lent"] == 0
    assert find_descendants() <= before
    assert AsyncGame.opened == AsyncGame.closed


# --- a life ---


@cases("name: Game AsyncGame open_async")
async def test_an_environment_lives_from_opening_to_closing(name):
    async with open_opener(name) as (open_one, workers):
        async with open_one({}) as world:
            assert await world.call("reset") == [{"role": "user", "content": "Guess!"}]
            seen = await world.call("step", say("3"))
            assert seen.messages == [{"role": "user", "content": "Higher!"}] and seen.reward is None
            looks = await use(world.tools, [("look", {}), ("look", {"far": True})])
            wanted = '{"calls": 1, "far": false}', '{"calls": 2, "far": true}'
            assert tuple(content for _, content in looks) == wanted
            assert world.tools[0].schema["function"]["description"] == "Looks around."
            seen = await world.call("step", say("7"))
            assert seen.done and seen.reward == RewardResult(1.5, {"right": 1.0, "fast": 0.5})
            assert (seen.messages, *seen.metadata["turns"]) == ([], 1)
            state, score = await world.call("state_dict"), await world.call("score")
            assert state == score.parts == {"calls": 2}
        async with open_one({}) as world:
            assert await world.call("load_state_dict", state) is None
            assert (await world.call("state_dict"), (await world.call("score")).note) == (state, score.note)
        # one process, for one after the other
        assert workers.statistics()["workers_started"] == (name == "Game")


async def test_all_but_step_may_be_left_out():
    async with open_opener("Bare") as (open_one, _), open_one({}) as world:
        got = [
            world.tools,
            await world.call("reset"),
            await world.call("score"),
            await world.call("state_dict"),
        ]
        assert [*got, await world.call("load_state_dict", {})] == [[], None, None, None, None]
        assert (await world.call("step", say("x"))).done


async def test_each_has_its_process_and_waits_for_a_free_one():
    async with open_opener("Game", count=2, timeout_s=5) as (open_one, workers):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(play, open_one, {})
        assert workers.statistics()["workers_started"] == 2


@cases("""
name                        | processes
open_that_changes_directory | 2
open_with_a_program         | 1
""")
async def test_a_process_that_is_left_as_it_was_serves_others(name, processes: int):
    async with open_opener(name) as (open_one, workers):
        for _ in range(2):
            await play(open_one, {})
        assert workers.statistics()["workers_started"] == processes


# --- what goes wrong ---


@BOTH
@cases("at: open reset step score")
async def test_what_a_method_raises_fails_the_trajectory_and_is_its_cause(name, at):
    async with open_opener(name) as (open_one, _):
        said = f"^environment {name}: {at} raised KeyError: 'gone'"
        with pytest.raises(EnvironmentFailed, match=said) as caught:
            await play(open_one, {"at": at, "do": "raise"})
        assert type(caught.value.__cause__) is (RaisedInWorker if name == "Game" else KeyError)
        await play(open_one, {})


@cases("""
do       | said
die      | lost its worker, which ended with exit code 3
fork     | forked its process
allocate | ran out of memory
print    | printed more than output_bytes
hang     | took longer than 1 s; make it faster or raise
fail     | raised EnvironmentFailed: the database is down
""")
async def test_an_environment_that_spoils_its_process_is_killed_alone(do, said):
    async with open_opener("Game", timeout_s=1) as (open_one, _), open_one({}) as other:
        for at in ("open", "step"):
            with pytest.raises(EnvironmentFailed, match=f"^environment Game: {at} {said}"):
                await play(open_one, {"at": at, "do": do})
        assert (await other.call("step", say("7"))).done


async def test_a_tool_of_an_environment_tells_the_model_unless_it_takes_the_process_with_it():
    async with open_opener("Game", timeout_s=1) as (open_one, _), open_one({}) as world:
        told = await use(world.tools, [("spoil", {"how": "raise"})])
        assert told == [("failed", "Error: spoil raised KeyError: 'gone'")]
        for how, said in (("fail", "the database is down"), ("hang", "spoil took longer than 1 s")):
            with pytest.raises(EnvironmentFailed, match=said):
                await use(world.tools, [("spoil", {"how": how})])
        with pytest.raises(EnvironmentFailed, match=r"^environment Game: score lost its worker"):
            await world.call("score")


@BOTH
@cases("""
answer      | said
number      | returned 7: it must be an Observation, or text
silent      | returned .*messages is an empty list; it must hold at least one
nan         | returned .*: it returned nan as its reward; it must be a finite number
metadata    | returned .*: metadata.a is a set
bad_message | returned .*messages\\[0\\] has no content
""")
async def test_an_answer_that_is_none_names_environment_value_and_rule(name, answer, said):
    async with open_opener(name) as (open_one, _):
        with pytest.raises(EnvironmentFailed, match=f"^environment {name}: step {said}"):
            await play(open_one, {"answer": answer})


async def test_an_async_environment_that_a_plain_function_opens_names_the_way_out():
    async with open_opener("open_async_by_a_plain_function") as (open_one, _):
        said = r"step is async; .* opened by an async function, or by its"
        with pytest.raises(EnvironmentFailed, match=said):
            await play(open_one, {})


@BOTH
async def test_an_error_in_closing_does_not_fail_what_is_finished(name):
    async with open_opener(name) as (open_one, _):
        for do in ("raise", "die") if name == "Game" else ("raise",):
            await play(open_one, {"at": "close", "do": do})
        assert AsyncGame.opened == AsyncGame.closed
        async with open_one({}) as world:
            assert await world.call("reset")  # others go on


# --- time and cancellation ---


@cases("name: Game AsyncGame open_async")
@cases("at: between step")
async def test_a_cancelled_trajectory_closes_its_environment_once(name, at):
    async with open_opener(name, timeout_s=600) as (open_one, workers):
        with trio.CancelScope() as scope:
            async with open_one({"at": at, "do": "hang"}) as world:
                await world.call("reset")
                scope.deadline = trio.current_time() + 0.3
                if at == "step":
                    await world.call("step", say("3"))
                await trio.sleep_forever()
        assert scope.cancelled_caught
        await play(open_one, {})
        assert workers.statistics()["workers_started"] == (name == "Game") * (1 + (at == "step"))


async def test_in_the_loop_a_step_has_its_time_and_a_task_that_fails_ends_its_trajectory(autojump_clock):
    opened = AsyncGame.opened
    in_loop = partial(open_world, request={}, workers=None, timeout_s=2)
    with pytest.raises(EnvironmentFailed, match=r"^environment AsyncGame: step took longer than 2 s"):
        await play(partial(in_loop, opener=AsyncGame), {"do": "hang"})
    open_one = partial(in_loop, {}, opener=hostile_worlds.open_with_a_task)
    with pytest.raises(EnvironmentFailed, match=r"open_with_a_task did not stay open: ValueError\('the task"):
        async with open_one():
            await trio.sleep_forever()
    assert trio.current_time() == 2 + 3
    with pytest.raises(KeyError, match="mine"):
        async with open_one():
            raise KeyError("mine")
    with trio.move_on_after(1) as scope:
        async with open_one():
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert AsyncGame.opened == AsyncGame.closed == opened + 4


# --- named by a config ---


def make_config(**rollout) -> RunConfig:
    data = [{"kind": "jsonl", "path": "rows.jsonl"}]
    return RunConfig.model_validate({"rl": {"data": data, "steps": 1, "rollout": rollout}})


async def test_what_a_config_names_is_opened_where_it_runs():
    config = make_config(environment=f"{FILE}:Game", tools=[f"{FILE}:calculate"])
    functions = load_functions(config, ("rl",), Findings(raises=True))
    before = find_descendants()
    async with open_functions(config, functions, warn=print) as running:
        assert await use(running.tools, [("calculate", {"a": 1, "operator": "+"})]) == [("ok", "3")]
        await play(running.environment, {})
    assert find_descendants() <= before


@cases("""
key         | name            | said
environment | :open_nothing   | has no open_nothing
environment | :refuse         | it is called with (row) but takes ()
tools       | :calculat       | did you mean calculate?
tools       | :Bare           | tool Bare: a model cannot call it
""")
def test_a_wrong_name_is_found_before_a_run(key, name, said):
    findings, named = Findings(), f"{FILE}{name}"
    load_functions(make_config(**{key: [named] if key == "tools" else named}), ("rl",), findings)
    (message,) = (one.message for one in findings if one[:2] == ("error", f"rl.rollout.{key}"))
    assert said in message
