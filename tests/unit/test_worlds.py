"""Environments, in worker processes (real processes, real time) and in the event loop: the same life, and
whatever goes wrong is the failure of one trajectory, with everything closed.
"""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from rollouts.config.schema import RunConfig
from rollouts.environments.protocol import Turn, World
from rollouts.environments.tools import call_tools
from rollouts.environments.worlds import open_world
from rollouts.errors import EnvironmentFailed, PlugInError
from rollouts.preflight.findings import Findings
from rollouts.preflight.functions import load_functions, open_functions
from rollouts.rewards.workers import RaisedInWorker, Workers, name_function, open_workers
from rollouts.types import RewardResult
from tests.support.processes import find_descendants
from tests.support.text_tables import cases
from tests.unit import hostile_worlds
from tests.unit.hostile_worlds import AsyncGame

HERE = Path(__file__).parent
MCP_COMMAND = f"{sys.executable} {HERE}/mcp_server.py"
OpenWorld = Callable[[Any], AbstractAsyncContextManager[World]]


def say(text: str) -> Turn:
    return Turn(message={"role": "assistant", "content": text}, text=text)


@asynccontextmanager
async def open_opener(
    name: str, *, timeout_s: float = 20, count: int = 4
) -> AsyncIterator[tuple[OpenWorld, Workers]]:
    """What opens the environments of a name of hostile_worlds.py. Everything is closed in the end."""
    before = find_descendants()
    options: dict[str, Any] = {"memory_bytes": 1 << 30, "module": "rollouts.environments.worker"}
    async with open_workers(count=count, timeout_s=timeout_s, **options) as workers:
        request = name_function("environment", f"hostile_worlds.py:{name}", HERE)
        opener = getattr(hostile_worlds, name)
        yield (
            partial(open_world, opener=opener, request=request, workers=workers, timeout_s=timeout_s),
            workers,
        )
        assert workers.statistics()["lent"] == 0
    assert find_descendants() <= before
    assert AsyncGame.opened == AsyncGame.closed


# --- a life ---


@pytest.mark.parametrize("name", ["Game", "AsyncGame", "open_async"])
async def test_an_environment_lives_from_opening_to_closing(name: str):
    async with open_opener(name) as (open_one, workers):
        async with open_one({}) as world:
            assert await world.reset() == [{"role": "user", "content": "Guess!"}]
            seen = await world.step(say("3"))
            assert (seen.messages, seen.reward, seen.done) == (
                [{"role": "user", "content": "Higher!"}],
                RewardResult(0.0),
                False,
            )
            calls = [
                {"id": str(i), "function": {"name": "look", "arguments": {"far": i == 1}}} for i in range(2)
            ]
            looks = await call_tools(calls, world.tools, timeout_s=9)
            assert [one.message["content"] for one in looks] == [
                '{"calls": 2, "far": false}',
                '{"calls": 3, "far": true}',
            ]
            assert world.tools[0].schema["function"]["description"] == "Looks around."
            seen = await world.step(say("7"))
            assert (seen.messages, seen.reward, seen.done) == (
                [],
                RewardResult(1.5, {"right": 1.0, "fast": 0.5}),
                True,
            )
            assert [*seen.metadata["turns"]] == [4]
            state, score = await world.state(), await world.score()
            assert (state, score and score.parts) == ({"calls": 4}, {"calls": 4.0})
        async with open_one({}) as world:
            assert await world.restore(state) is None
            assert await world.state() == state
            again = await world.score()
        # one process, for one after the other; a thread of the trainer's for neither
        assert workers.statistics()["workers_started"] == (name == "Game")
        assert (score and score.note) == (again and again.note)


async def test_all_but_step_may_be_left_out():
    async with open_opener("Bare") as (open_one, _), open_one({}) as world:
        assert world.tools == []
        assert [await world.reset(), await world.score(), await world.state()] == [None] * 3
        assert await world.restore({}) is None
        assert (await world.step(say("x"))).done


async def test_environments_have_processes_of_their_own_and_wait_for_a_free_one():
    async with open_opener("Game", count=2, timeout_s=5) as (open_one, workers):
        notes: list[Any] = []

        async def live(seconds: float) -> None:
            async with open_one({}) as world:
                await trio.sleep(seconds)
                notes.append((await world.score()).note)  # type: ignore[union-attr]

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(live, 0.2)
        assert len(set(notes)) == 2 == workers.statistics()["workers_started"]


@cases("name: open_that_changes_directory open_with_a_program")
async def test_a_process_that_is_left_as_it_was_serves_others(name: str):
    async with open_opener(name) as (open_one, workers):
        for _ in range(2):
            async with open_one({}) as world:
                await world.step(say("3"))
        changed = name == "open_that_changes_directory"
        assert workers.statistics()["workers_started"] == 1 + changed


# --- what goes wrong ---


@pytest.mark.parametrize("name", ["Game", "AsyncGame"])
@cases("at: open reset step score")
async def test_what_a_method_raises_fails_the_trajectory_and_is_its_cause(name: str, at: str):
    async with open_opener(name) as (open_one, _):
        with pytest.raises(
            EnvironmentFailed, match=f"^environment {name}: {at} raised KeyError: 'gone'"
        ) as caught:
            await play(open_one, {"at": at, "do": "raise"})
        cause = caught.value.__cause__
        assert isinstance(cause, RaisedInWorker if name == "Game" else KeyError)
        assert name == "AsyncGame" or "hostile_worlds.py" in str(cause)
        await play(open_one, {})


async def play(open_one: OpenWorld, row: Any) -> None:
    async with open_one(row) as world:
        await world.reset()
        await world.step(say("7"))
        await world.score()


@cases("""
do       | said
die      | lost its worker, which ended with exit code 3
fork     | forked its process
allocate | ran out of memory
print    | printed more than output_bytes
hang     | took longer than 1 s; make it faster or raise
fail     | raised EnvironmentFailed: the database is down
""")
@cases("at: open step")
async def test_an_environment_that_spoils_its_process_is_killed_alone(do: str, said: str, at: str):
    async with open_opener("Game", timeout_s=1) as (open_one, _), open_one({}) as other:
        with pytest.raises(EnvironmentFailed, match=f"^environment Game: {at} {said}"):
            await play(open_one, {"at": at, "do": do})
        assert (await other.step(say("7"))).done


async def test_a_tool_of_an_environment_tells_the_model_unless_it_takes_the_process_with_it():
    async with open_opener("Game", timeout_s=1) as (open_one, _), open_one({}) as world:

        async def spoil(how: str) -> str:
            call = {"id": "1", "function": {"name": "spoil", "arguments": {"how": how}}}
            return (await call_tools([call], world.tools, timeout_s=1))[0].message["content"]

        assert await spoil("raise") == "Error: spoil raised KeyError: 'gone'"
        for how, said in (("fail", "the database is down"), ("hang", "spoil took longer than 1 s")):
            with pytest.raises(EnvironmentFailed, match=said):
                await spoil(how)
        with pytest.raises(EnvironmentFailed, match=r"^environment Game: score lost its worker"):
            await world.score()


@pytest.mark.parametrize("name", ["Game", "AsyncGame"])
@cases("""
answer      | said
number      | step returned 7: it must be an Observation, or text
silent      | step returned .*messages is an empty list; it must hold at least one
nan         | step returned .*: it returned nan as its reward; it must be a finite number
metadata    | step returned .*: metadata.a is a set
bad_message | step returned .*messages\\[0\\] has no content
""")
async def test_an_answer_that_is_none_names_environment_value_and_rule(name: str, answer: str, said: str):
    async with open_opener(name) as (open_one, _):
        with pytest.raises(EnvironmentFailed, match=f"^environment {name}: {said}"):
            await play(open_one, {"answer": answer})


async def test_an_async_environment_that_a_plain_function_opens_names_the_way_out():
    async with open_opener("open_async_by_a_plain_function") as (open_one, _):
        with pytest.raises(
            EnvironmentFailed, match=r"step is async; .* opened by an async function, or by its"
        ):
            await play(open_one, {})


@pytest.mark.parametrize("name", ["Game", "AsyncGame"])
@cases("do: raise die")
async def test_an_error_in_closing_does_not_fail_what_is_finished(name: str, do: str):
    if (name, do) != ("AsyncGame", "die"):
        async with open_opener(name) as (open_one, _):
            await play(open_one, {"at": "close", "do": do})


async def test_a_late_step_and_a_late_closing_in_the_loop_end_in_their_time(
    autojump_clock: trio.testing.MockClock,
):
    open_one = partial(open_world, opener=AsyncGame, request={}, workers=None, timeout_s=3)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailed, match=r"^environment AsyncGame: step took longer than 3 s"):
        await play(open_one, {"at": "step", "do": "hang"})
    assert trio.current_time() == 3


# --- cancellation ---


@pytest.mark.parametrize("name", ["Game", "AsyncGame", "open_async"])
@cases("row: between within")
async def test_a_cancelled_trajectory_closes_its_environment_once(name: str, row: str):
    async with open_opener(name, timeout_s=600) as (open_one, workers):
        with trio.CancelScope() as scope:
            async with open_one({"at": "step", "do": "hang"}) as world:
                await world.reset()
                scope.deadline = trio.current_time() + 0.3
                if row == "within":
                    await world.step(say("3"))
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert AsyncGame.opened == AsyncGame.closed
        await play(open_one, {})
        assert workers.statistics()["workers_started"] == (name == "Game") * (1 + (row == "within"))


async def test_a_task_of_an_environment_that_fails_ends_its_trajectory_and_errors_of_the_block_pass(
    autojump_clock: trio.testing.MockClock,
):
    open_one = partial(
        open_world,
        opener=hostile_worlds.open_with_a_task,
        request={},
        workers=None,  # type: ignore[arg-type]
        timeout_s=9,
    )
    opened = AsyncGame.opened
    with pytest.raises(EnvironmentFailed, match=r"open_with_a_task did not stay open: ValueError\('the task"):
        async with open_one({"ends_s": 3}):
            await trio.sleep(5)
    assert trio.current_time() == 3
    with pytest.raises(KeyError, match="mine"):
        async with open_one({"ends_s": 9}):
            raise KeyError("mine")
    with trio.move_on_after(1) as scope:
        async with open_one({"ends_s": 9}):
            await trio.sleep(5)
    assert scope.cancelled_caught
    assert AsyncGame.closed - opened == 3 == AsyncGame.opened - opened


# --- named by a config ---


def make_config(**rollout: Any) -> RunConfig:
    data = [{"kind": "jsonl", "path": "rows.jsonl"}]
    return RunConfig.model_validate({"rl": {"data": data, "steps": 1, "rollout": rollout}})


async def test_what_a_config_names_is_opened_where_it_runs():
    file = f"{HERE}/hostile_worlds.py"
    config = make_config(environment=f"{file}:Game", tools=[f"{file}:calculate", f"mcp:{MCP_COMMAND}"])
    functions = load_functions(config, ("rl",), Findings(raises=True))
    assert [tool.name for tool in functions.tools] == ["calculate"]
    before = find_descendants()
    async with open_functions(config, functions, warn=print) as running:
        assert [tool.name for tool in running.tools] == ["calculate", "add", "hang", "die", "lines"]
        arguments = [("calculate", {"a": 1, "operator": "+"}), ("add", {"a": 1, "b": 3})]
        calls = [{"id": one, "function": {"name": one, "arguments": given}} for one, given in arguments]
        results = await call_tools(calls, running.tools, timeout_s=30)
        assert [result.message["content"] for result in results] == ["3", "4"]
        assert running.environment is not None
        await play(running.environment, {})
    assert find_descendants() <= before
    with pytest.raises(PlugInError, match=r"rl.rollout.tools: two have one name: \['add', 'hang'"):
        async with open_functions(make_config(tools=[f"mcp:{MCP_COMMAND}"] * 2), functions, warn=print):
            raise AssertionError("opened")


@cases("""
key         | name            | said
environment | :open_nothing   | has no open_nothing
environment | :child          | it is called with (row) but takes ()
tools       | :calculat       | did you mean calculate?
tools       | :Bare           | tool Bare: a model cannot call it
""")
def test_a_wrong_name_is_found_before_a_run(key: str, name: str, said: str):
    findings, named = Findings(), f"{HERE}/hostile_worlds.py{name}"
    load_functions(make_config(**{key: [named] if key == "tools" else named}), ("rl",), findings)
    (found,) = [one for one in findings if one.subject == f"rl.rollout.{key}"]
    assert (found.level, said in found.message) == ("error", True), found.message
