"""Tools: the schemas of typed functions, and what the model reads of calls that go right and wrong."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import trio
from pydantic import Field

from rollouts.environments.protocol import Tool
from rollouts.environments.tools import ToolResult, answer_unreadable, call_tools, load_tool, make_tool
from rollouts.environments.worker import OUTPUT_CHARS
from rollouts.errors import EnvironmentFailed, PlugInError
from rollouts.rewards.workers import open_workers
from tests.support.processes import find_descendants, wait_until
from tests.support.text_tables import cases, read_cells
from tests.unit import hostile_worlds

HERE = Path(__file__).parent


def make_call(name: str, arguments: Any, call_id: str = "c0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def ask(tools: list[Tool], name: str, arguments: Any, *, timeout_s: float = 10) -> ToolResult:
    (result,) = await call_tools([make_call(name, arguments)], tools, timeout_s=timeout_s)
    assert result.message == {**result.message, "role": "tool", "tool_call_id": "c0", "name": name}
    return result


# --- schemas ---


def test_the_schema_is_the_signature_and_the_docstring():
    assert make_tool(hostile_worlds.calculate).schema == {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculates.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "operator": {"type": "string", "enum": ["+", "/"]},
                    "b": {
                        "type": "integer",
                        "default": 2,
                        "description": "the second number, which is not 0 for /",
                    },
                },
                "required": ["a", "operator"],
                "additionalProperties": False,
            },
        },
    }


def no_hint(a): ...
def one_hint(a: int, b): ...
def stars(*a: int): ...
def keywords(**a: int): ...
def by_position(a: int, /): ...
def callback(a: Callable[[], int]): ...
def unknown_type(a: "Nowhere"): ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    "function", [no_hint, one_hint, stars, keywords, by_position, callback, unknown_type, max, partial(print)]
)
def test_a_function_that_json_cannot_call_is_refused(function: Any):
    with pytest.raises(PlugInError, match=r"a model cannot call it .*write a plain function whose"):
        make_tool(function)


def kinds(
    a: int, b: Annotated[float, Field(ge=0)] = 0.5, copy: list[str] | None = None, *, _x: bool = False
) -> str:
    return repr((a, b, copy, _x))


@cases("""
arguments | outcome | content
{"a": 1} | ok | (1, 0.5, None, False)
{"a": "3", "b": 1, "copy": ["x"], "_x": "yes"} | ok | (3, 1.0, ['x'], True)
"{\\"a\\": 2}" | ok | (2, 0.5, None, False)
{} | arguments | Error: argument 'a': Missing required argument
{"a": 1, "c": 2} | arguments | Error: argument 'c': Unexpected keyword argument
{"a": 1, "b": -1} | arguments | Error: argument 'b': Input should be greater than or equal to 0
{"a": 1, "copy": [1]} | arguments | Error: argument 'copy.0': Input should be a valid string
"{a: 1}" | arguments | Error: arguments is '{a: 1}', which is not the JSON text of an object
[1] | arguments | Error: arguments is [1]; it must be an object or its JSON text
""")
async def test_arguments_become_values_of_their_types_or_words(arguments: Any, outcome: str, content: str):
    result = await ask([make_tool(kinds)], "kinds", arguments)
    assert result.outcome == outcome
    assert result.message["content"].startswith(content)


# --- calls in the event loop ---


async def nap(seconds: float) -> dict[str, float]:
    await trio.sleep(seconds)
    if seconds == 2:
        raise ValueError("woken")
    return {"slept": seconds}


async def fail() -> str:
    raise EnvironmentFailed("the database is down")


async def test_calls_overlap_and_answer_in_their_order_though_one_fails(
    autojump_clock: trio.testing.MockClock,
):
    calls = [make_call("nap", {"seconds": one}, f"c{one}") for one in (9, 2, 4, 1)]
    results = await call_tools(calls, [make_tool(nap)], timeout_s=5)
    assert trio.current_time() == 5
    assert [one.message["tool_call_id"] for one in results] == ["c9", "c2", "c4", "c1"]
    assert [one.outcome for one in results] == ["timeout", "failed", "ok", "ok"]
    assert [one.seconds for one in results] == [5, 2, 4, 1]
    assert [one.message["content"] for one in results] == [
        "Error: nap took longer than 5 s",
        "Error: nap raised ValueError: woken",
        '{"slept": 4.0}',
        '{"slept": 1.0}',
    ]


async def test_a_failed_environment_ends_the_other_calls_and_cancellation_passes(
    autojump_clock: trio.testing.MockClock,
):
    tools = [make_tool(nap), make_tool(fail)]
    calls = [make_call("nap", {"seconds": 60}), make_call("fail", {})]
    with pytest.raises(EnvironmentFailed, match="the database is down"):
        await call_tools(calls, tools, timeout_s=99)
    assert trio.current_time() == 0
    with trio.move_on_after(3) as scope:
        await call_tools(calls[:1], tools, timeout_s=99)
    assert scope.cancelled_caught


async def test_a_tool_that_there_is_not_and_a_call_that_could_not_be_read():
    result = await ask([make_tool(nap), make_tool(fail)], "look", {})
    assert result.outcome == "unknown"
    assert result.message["content"] == "Error: there is no tool 'look'; the tools are nap, fail"
    assert answer_unreadable("bad JSON") == {
        "role": "tool",
        "content": "Error: the tool call could not be read: bad JSON",
    }


# --- calls in workers ---

# a function of hostile_worlds.py | its arguments | outcome | what the model reads
IN_WORKERS = r"""
calculate | {"a": "3", "operator": "+"}              | ok        | 5
calculate | {"a": 1, "operator": "/", "b": 0}        | failed    | Error: calculate raised ZeroDivisionError: division by zero
calculate | {"a": "x", "operator": "+"}              | arguments | Error: argument 'a': Input should be a valid integer, unable to parse string as an integer
nothing   | {}                                       | ok        | null
long      | {"chars": 32768}                         | ok        | xxx
long      | {"chars": 10485760}                      | too_long  | Error: the result has 10485760 characters; at most 32768 are allowed
odd       | {}                                       | failed    | Error: the result.a is a set; it must be a JSON value (numpy scalars: call .item())
refuse    | {}                                       | failed    | Error: not today; come back
child     | {}                                       | crashed   | Error: child left a process running behind it
spoil     | {"how": "raise"}                         | failed    | Error: spoil raised KeyError: 'gone'
spoil     | {"how": "die"}                           | crashed   | Error: spoil lost its worker, which ended with exit code 3
spoil     | {"how": "fork"}                          | crashed   | Error: spoil forked its process (os.fork or multiprocessing)
spoil     | {"how": "allocate"}                      | crashed   | Error: spoil ran out of memory (MemoryError: )
spoil     | {"how": "print"}                         | crashed   | Error: spoil printed more than output_bytes=1048576
spoil     | {"how": "hang"}                          | timeout   | Error: spoil took longer than 1 s
"""  # noqa: E501


async def test_whatever_a_sync_tool_does_becomes_words_and_nothing_is_left_behind():
    before = find_descendants()
    names = ["calculate", "nothing", "long", "odd", "refuse", "child", "spoil"]
    options: dict[str, Any] = {"memory_bytes": 1 << 30, "module": "rollouts.environments.worker"}
    async with open_workers(count=2, timeout_s=1, **options) as workers:
        tools = [load_tool(f"{HERE}/hostile_worlds.py:{name}", workers) for name in names]
        assert [tool.name for tool in tools] == names
        for name, arguments, outcome, content in read_cells(IN_WORKERS):
            result = await ask(tools, name, json.loads(arguments), timeout_s=0.001)
            assert (result.outcome, result.message["content"][:150]) == (
                outcome,
                content if content != "xxx" else "x" * 150,
            )
        with pytest.raises(EnvironmentFailed, match="spoil raised EnvironmentFailed: the database is down"):
            await ask(tools, "spoil", {"how": "fail"})
        calls = [make_call("calculate", {"a": one, "operator": "+"}) for one in range(5)]
        answers = await call_tools(calls, tools, timeout_s=1)
        assert [answer.message["content"] for answer in answers] == ["2", "3", "4", "5", "6"]
        assert workers.statistics()["lent"] == 0
        await wait_until(lambda: len(find_descendants() - before) == 6)
    assert find_descendants() <= before


async def test_a_result_is_cut_off_by_name_and_half_a_pair_of_surrogates_is_replaced():
    async def say(text: str) -> Any:
        return {"said": text}

    limits: dict[str, Any] = {"timeout_s": 1, "output_chars": 16}
    for text, content in (("ü\ud800", '{"said": "ü?"}'), ("longer", "at most 16 are allowed")):
        (result,) = await call_tools([make_call("say", {"text": text})], [make_tool(say)], **limits)
        assert result.message["content"].endswith(content)
    assert OUTPUT_CHARS == 32_768
