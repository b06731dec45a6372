"""Functions that the model may call. A sync one runs in a worker process, an async one in the trainer's loop.

    make_tool    typed function ──► Tool
    load_tools   names of the config ──► Tools
    call_tools   tool calls of a message ──► side by side ──► the tools' messages, in the order of the calls

Whatever a call does wrong becomes text for the model, beginning with "Error:".
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio

from rollouts.config.plugins import load_function
from rollouts.environments.protocol import Tool
from rollouts.environments.worker import OUTPUT_CHARS, check_result, inspect_tool
from rollouts.errors import EnvironmentFailed, ToolError, UserFunctionError
from rollouts.messages import parse_tool_arguments
from rollouts.processes.nurseries import run_all
from rollouts.rewards.call import call_user
from rollouts.rewards.check import function_name, is_async
from rollouts.rewards.worker import TEXT_CHARS
from rollouts.rewards.workers import PRINTED, Workers, name_function
from rollouts.types import ChatMessage, JSONValue

MCP = "mcp:"  # begins an entry of rl.rollout.tools that names a server and no function


class ToolResult(NamedTuple):
    """What became of one tool call."""

    message: ChatMessage  # the tool's
    outcome: str  # ok, or the kind of a ToolError
    seconds: float  # from the call to the answer


async def run_here(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What the function gives, called in this loop, and awaited if it is async."""
    answer = function(*arguments, **named)
    return await answer if inspect.isawaitable(answer) else answer


def make_tool(function: Callable[..., Any]) -> Tool:
    """A typed function as a Tool that calls it in this loop. Raises PlugInError as inspect_tool does."""
    schema, read_arguments = inspect_tool(function)

    async def call(arguments: JSONValue) -> JSONValue:
        return await run_here(function, **read_arguments(arguments))

    return Tool(function_name(function), schema, call)


def bind_tool(schema: JSONValue, ask: Callable[..., Any], request: JSONValue) -> Tool:
    """A Tool whose calls are requests to a worker that runs rollouts.environments.worker."""
    name = schema["function"]["name"]

    async def call(arguments: JSONValue) -> JSONValue:
        return await ask({**request, "method": "tool", "arguments": arguments}, name)

    # waiting for a worker is not the function's time
    call.keeps_own_time = True  # pyright: ignore[reportFunctionMemberAccess]
    return Tool(name, schema, call)


def load_tools(names: Sequence[str], workers: Workers | None = None) -> list[Tool]:
    """The functions that `names` mean, MCP servers left out; sync ones are called in the workers, if there
    are any. Raises PlugInError for a function that is no tool.
    """
    tools: list[Tool] = []
    for name in names:
        if not name.startswith(MCP):
            function = load_function(name, role="tool")
            tools.append(make_tool(function))
            if workers and not is_async(function):
                request = name_function("tool", name, Path.cwd())
                tools.append(bind_tool(tools.pop().schema, workers.call, request))
    return tools


async def call_tools(
    calls: Sequence[JSONValue], tools: Sequence[Tool], *, timeout_s: float, output_chars: int = OUTPUT_CHARS
) -> list[ToolResult]:
    """What the tools answer to the tool_calls of a checked message, in their order. All run at once, each
    within `timeout_s`; one that fails does not end the others.

    Raises EnvironmentFailed if a tool does; the others are then cancelled.
    """
    by_name = {tool.name: tool for tool in tools}
    results: list[Any] = [*calls]

    async def answer(index: int, call: JSONValue) -> None:
        began_s, name, outcome = trio.current_time(), call["function"]["name"], "ok"
        try:
            if name not in by_name:
                raise ToolError("unknown", f"there is no tool {name!r}; the tools are {', '.join(by_name)}")
            arguments = parse_tool_arguments(call["function"]["arguments"], "arguments")
            value = await call_user(by_name[name].call, arguments, where=name, timeout_s=timeout_s)
            content = check_result(value, output_chars)
        except (ToolError, ValueError, UserFunctionError) as error:
            own = error.__cause__ if isinstance(error.__cause__, ToolError | EnvironmentFailed) else error
            if isinstance(own, EnvironmentFailed):
                raise own from own.__cause__
            outcome = getattr(own, "kind", "arguments")
            # the rest is for the tool's author
            end = ";" if outcome in ("timeout", "crashed") else PRINTED
            content = f"Error: {str(own).partition(end)[0][:TEXT_CHARS]}"
        message = ChatMessage(role="tool", content=content, tool_call_id=call["id"], name=name)
        results[index] = ToolResult(message, outcome, trio.current_time() - began_s)

    await run_all(*(partial(answer, *one) for one in enumerate(calls)))
    return results


def answer_unreadable(why: str) -> ToolResult:
    """What the model reads after a turn whose tool calls could not be read."""
    content = f"Error: the tool call could not be read: {why[:TEXT_CHARS]}"
    return ToolResult(ChatMessage(role="tool", content=content), "unreadable", 0.0)
