"""Functions that the model may call: a sync one runs in a worker process, an async one in the trainer's loop.

    make_tool    typed function ──► Tool
    load_tool    name of the config ──► Tool
    call_tools   tool calls of a message ──► side by side ──► the tools' messages, in the order of the calls

Whatever a call does wrong becomes text for the model, beginning with "Error:".
"""

import inspect
from collections.abc import Sequence
from functools import partial

import trio

from rollouts.config.plugins import load_function
from rollouts.environments.protocol import Tool
from rollouts.environments.turns import ToolResult
from rollouts.environments.worker import check_result, inspect_tool
from rollouts.errors import EnvironmentFailed, ToolError, UserFunctionError
from rollouts.messages import parse_tool_arguments
from rollouts.processes.nurseries import run_all
from rollouts.rewards.call import call_user
from rollouts.rewards.check import is_async
from rollouts.rewards.worker import TEXT_CHARS
from rollouts.rewards.workers import PRINTED, Workers, name_function
from rollouts.types import ChatMessage, Function, JSONValue


def make_tool(function: Function) -> Tool:
    """A typed function as a Tool that calls it in this loop. Raises PlugInError as inspect_tool does."""
    schema, read_arguments = inspect_tool(function)

    async def call(arguments: JSONValue) -> JSONValue:
        answer = function(**read_arguments(arguments))
        return await answer if inspect.isawaitable(answer) else answer

    return Tool(schema["function"]["name"], schema, call)


def bind_tool(schema: JSONValue, ask: Function, request: JSONValue) -> Tool:
    """A Tool whose calls are requests to a worker that runs rollouts.environments.worker."""
    name = schema["function"]["name"]

    async def call(arguments: JSONValue) -> JSONValue:
        return await ask({**request, "method": "tool", "arguments": arguments}, name)

    # waiting for a worker is not the function's time
    call.keeps_own_time = True  # pyright: ignore[reportFunctionMemberAccess]
    return Tool(name, schema, call)


def load_tool(name: str, workers: Workers | None = None) -> Tool:
    """The function that `name` means as a Tool, called in the workers if it is sync and there are any. Raises
    PlugInError for a function that is none.
    """
    function = load_function(name, role="tool")
    tool = make_tool(function)
    if workers is None or is_async(function):
        return tool
    return bind_tool(tool.schema, workers.call, name_function("tool", name))


async def call_tools(
    calls: Sequence[JSONValue], tools: Sequence[Tool], *, timeout_s: float
) -> list[ToolResult]:
    """What the tools answer to the tool_calls of a checked message, in their order. All run at once, each
    within `timeout_s`; one that fails does not end the others.

    Raises EnvironmentFailed if a tool does; the others are then cancelled.
    """
    by_name = {tool.name: tool for tool in tools}

    async def answer(call: JSONValue) -> ToolResult:
        began_s, name, outcome = trio.current_time(), call["function"]["name"], "ok"
        try:
            if name not in by_name:
                raise ToolError("unknown", f"there is no tool {name!r}; the tools are {', '.join(by_name)}")
            arguments = parse_tool_arguments(call["function"]["arguments"])
            value = await call_user(by_name[name].call, arguments, where=name, timeout_s=timeout_s)
            content = check_result(value)
        except (ToolError, ValueError, UserFunctionError) as error:
            own = error.__cause__ if isinstance(error.__cause__, ToolError | EnvironmentFailed) else error
            if isinstance(own, EnvironmentFailed):
                raise own from own.__cause__
            outcome = getattr(own, "kind", "arguments")
            # the rest is for the tool's author
            end = ";" if outcome in ("timeout", "crashed") else PRINTED
            content = f"Error: {str(own).partition(end)[0][:TEXT_CHARS]}"
        message = ChatMessage(role="tool", content=content, tool_call_id=call["id"], name=name)
        return ToolResult(message, outcome, trio.current_time() - began_s)

    return await run_all(*(partial(answer, call) for call in calls))
