"""Functions that the model may call: a sync one runs in a worker process, an async one in the trainer's loop.
And the tools of MCP servers, by the official SDK, which the extra `mcp` installs.

    make_tool    typed function ──► Tool
    load_tool    name of the config ──► Tool
    call_tools   tool calls of a message ──► side by side ──► the tools' messages, in the order of the calls

Whatever a call does wrong becomes text for the model, beginning with "Error:".
"""

import inspect
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
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
from rollouts.rewards.call import call_user, find_own
from rollouts.rewards.check import describe, import_extra, is_async
from rollouts.rewards.worker import TEXT_CHARS
from rollouts.rewards.workers import PRINTED, Workers, name_function
from rollouts.types import ChatMessage, JSONValue

OPEN_S = 60.0  # for an MCP server to start
CLOSE_S = 10.0  # for what was opened to close, also where the block was cancelled
MCP = "mcp:"  # begins an entry of rl.rollout.tools that names a server and no function


class ToolResult(NamedTuple):
    """What became of one tool call."""

    message: ChatMessage  # the tool's
    outcome: str  # ok, or the kind of a ToolError
    seconds: float  # from the call to the answer


def make_tool(function: Callable[..., Any]) -> Tool:
    """A typed function as a Tool that calls it in this loop. Raises PlugInError as inspect_tool does."""
    schema, read_arguments = inspect_tool(function)

    async def call(arguments: JSONValue) -> JSONValue:
        answer = function(**read_arguments(arguments))
        return await answer if inspect.isawaitable(answer) else answer

    return Tool(schema["function"]["name"], schema, call)


def bind_tool(schema: JSONValue, ask: Callable[..., Any], request: JSONValue) -> Tool:
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
    return bind_tool(tool.schema, workers.call, name_function("tool", name, Path.cwd()))


async def call_tools(
    calls: Sequence[JSONValue], tools: Sequence[Tool], *, timeout_s: float, output_chars: int = OUTPUT_CHARS
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
        return ToolResult(message, outcome, trio.current_time() - began_s)

    return await run_all(*(partial(answer, call) for call in calls))


def answer_unreadable(why: str) -> ToolResult:
    """What the model reads after a turn whose tool calls could not be read."""
    content = f"Error: the tool call could not be read: {why[:TEXT_CHARS]}"
    return ToolResult(ChatMessage(role="tool", content=content), "unreadable", 0.0)


# --- MCP servers --------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_mcp_tools(source: str, timeout_s: float) -> AsyncIterator[list[Tool]]:
    """The tools of a server, for as long as the context is open: its http(s) address, or a command, which is
    started without a shell, with PATH, HOME and little else of this process's environment.

    `timeout_s` is a call's, which call_tools keeps. A command that ignores the end of its input outlives a
    trainer that is killed. Raises ConfigError without the SDK, EnvironmentFailed if the server does not open.
    """
    mcp, what, (command, *words) = (
        import_extra("mcp", source, extra="mcp"),
        f"MCP server {source!r}",
        shlex.split(source),
    )
    server = source if "://" in command else mcp.StdioServerParameters(command=command, args=words)
    client: Any = mcp.Client(server, read_timeout_seconds=timeout_s + OPEN_S)

    async def call(name: str, arguments: JSONValue) -> str:
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            raise EnvironmentFailed(f"{what} failed in {name}: {describe(error)}") from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError("failed", text)
        return text

    async with open_apart(lambda stack: stack.enter_async_context(client), what):
        page = await client.list_tools()
        found = page.tools
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            found += page.tools
        yield [
            Tool(
                one.name,
                {
                    "type": "function",
                    "function": {
                        "name": one.name,
                        "description": one.description or "",
                        "parameters": one.input_schema,
                    },
                },
                partial(call, one.name),
            )
            for one in found
        ]


@asynccontextmanager
async def open_apart(fill: Callable[[AsyncExitStack], Any], what: str) -> AsyncIterator[Any]:
    """What `fill` gives, and closed on every way out within CLOSE_S what it put on the stack, which does not
    see the errors of the block: they are raised as they are.

    Raises EnvironmentFailed, beginning with `what`, if it does not open, or if it ends the block by itself.
    An error in closing is dropped.
    """
    ended, failure, broken = False, None, None
    with trio.CancelScope() as life:
        try:
            async with AsyncExitStack() as stack:
                value = await fill(stack)
                try:
                    yield value
                    ended = True
                except Exception as error:
                    ended, failure = True, error
                finally:
                    life.shield, life.deadline = True, trio.current_time() + CLOSE_S
        except Exception as error:
            broken = find_own(error)
    await trio.lowlevel.checkpoint_if_cancelled()  # which closing may have hidden
    if failure:
        raise failure
    if isinstance(broken, EnvironmentFailed) and not ended:
        raise broken
    if not ended:
        raise EnvironmentFailed(f"{what} did not stay open: {broken!r}") from broken
