"""Tools: the schemas of typed functions, and what the model reads of calls that go right and wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import trio
from pydantic import Field

from rollouts.environments import worker
from rollouts.environments.tools import call_tools, load_tool, make_tool
from rollouts.errors import EnvironmentFailed, PlugInError
from rollouts.rewards.workers import open_workers
from tests.support.processes import find_descendants
from tests.support.text_tables import cases, read_cells
from tests.unit.hostile_worlds import calculate, use

FILE = Path(__file__).with_name("hostile_worlds.py")
SCHEMA = """
{"type": "function", "function": {"name": "calculate", "description": "Calculates.", "parameters": {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "description": "the first number"},
        "operator": {"type": "string", "enum": ["+", "/"]},
        "b": {"type": "integer", "default": 2, "description": "the second number, which is not 0 for /"}
    },
    "required": ["a", "operator"],
    "additionalProperties": false
}}}"""


def test_the_schema_is_the_signature_and_the_docstring():
    assert make_tool(calculate).schema == json.loads(SCHEMA)


@cases("parameters: a a:int,b *a:int **a:int a:int,/ a:Callable[[],int] a:'Nowhere'")
def test_a_function_that_json_cannot_call_is_refused(parameters):
    made = {"Callable": Callable}
    exec(f"def f({parameters}): ...", made)  # noqa: S102
    with pytest.raises(
        PlugInError, match=r"^tool f: a model cannot call it .*; write a plain function whose"
    ):
        make_tool(made["f"])


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
async def test_arguments_become_values_of_their_types_or_words(arguments: Any, outcome, content):
    ((made, said),) = await use([make_tool(kinds)], [("kinds", arguments)])
    assert (made, said[: len(content)]) == (outcome, content)


async def nap(seconds: float) -> dict[str, float]:
    await trio.sleep(seconds)
    if seconds == 2:
        raise ValueError("woken")
    return {"slept": seconds}


async def down() -> str:
    raise EnvironmentFailed("the database is down")


TOOLS = [make_tool(nap), make_tool(down)]


async def test_calls_overlap_and_answer_in_their_order_though_some_fail(autojump_clock, monkeypatch):
    calls = [("nap", {"seconds": one}) for one in (9, 2, 4)]
    found = await use(TOOLS, [*calls, ("look", {})], timeout_s=5)
    assert [*map(list, found)] == read_cells("""
        timeout | Error: nap took longer than 5 s
        failed  | Error: nap raised ValueError: woken
        ok      | {"slept": 4.0}
        unknown | Error: there is no tool 'look'; the tools are nap, down
    """)
    assert trio.current_time() == 5
    call = json.loads(r'{"id": "c", "function": {"name": "nap", "arguments": "{\"seconds\": 3}"}}')
    monkeypatch.setattr(worker, "OUTPUT_CHARS", 9)
    (result,) = await call_tools([call], TOOLS, timeout_s=5)
    assert (result.outcome, result.seconds) == ("too_long", 3)


async def test_a_failed_environment_ends_the_other_calls_and_cancellation_passes(autojump_clock):
    with pytest.raises(EnvironmentFailed, match="the database is down"):
        await use(TOOLS, [("nap", {"seconds": 60}), ("down", {})], timeout_s=99)
    with trio.move_on_after(3) as scope:
        await use(TOOLS, [("nap", {"seconds": 60})], timeout_s=99)
    assert scope.cancelled_caught
    assert trio.current_time() == 3


# arguments | outcome | what the model reads
IN_WORKERS = """
{"a": "3", "operator": "+"}       | ok        | 5
{"a": 1, "operator": "/", "b": 0} | failed    | Error: calculate raised ZeroDivisionError: division by zero
{"a": 1}                          | arguments | Error: argument 'operator': Missing required argument
{}                                | failed    | Error: not today; come back
{"how": "none"}                   | ok        | null
{"how": "half"}                   | ok        | {"said": "ü?"}
{"how": "long"}                   | too_long  | Error: the result has 10485760 characters; at most 32768 are allowed
{"how": "set"}                    | failed    | Error: the result.a is a set; it must be a JSON value (numpy scalars: call .item())
{"how": "child"}                  | crashed   | Error: spoil left a process running behind it
{"how": "raise"}                  | failed    | Error: spoil raised KeyError: 'gone'
{"how": "die"}                    | crashed   | Error: spoil lost its worker, which ended with exit code 3
{"how": "fork"}                   | crashed   | Error: spoil forked its process (os.fork or multiprocessing)
{"how": "allocate"}               | crashed   | Error: spoil ran out of memory (MemoryError: )
{"how": "print"}                  | crashed   | Error: spoil printed more than output_bytes=1048576
{"how": "hang"}                   | timeout   | Error: spoil took longer than 1 s
"""  # noqa: E501


async def test_whatever_a_sync_tool_does_becomes_words_and_nothing_is_left_behind():
    before, module = find_descendants(), "rollouts.environments.worker"
    async with open_workers(count=2, timeout_s=1, memory_bytes=1 << 30, module=module) as workers:
        tools = [load_tool(f"{FILE}:{name}", workers) for name in ("calculate", "refuse", "spoil")]
        for arguments, *wanted in read_cells(IN_WORKERS):
            name = "calculate" if '"a"' in arguments else "spoil" if "how" in arguments else "refuse"
            # the time is the workers'
            assert await use(tools, [(name, arguments)], timeout_s=0.001) == [tuple(wanted)]
        with pytest.raises(EnvironmentFailed, match="spoil raised EnvironmentFailed: the database is down"):
            await use(tools, [("spoil", {"how": "fail"})])
        calls = [("calculate", {"a": one, "operator": "+"}) for one in range(5)]
        assert await use(tools, calls) == [("ok", str(one + 2)) for one in range(5)]
        assert workers.statistics()["lent"] == 0
    assert find_descendants() <= before
