"""Environments, opened for one row and closed once, with the same methods wherever they live; and the tools
of MCP servers, by the official SDK, which the extra `mcp` installs.

    open_world ──► async: in the trainer's loop, each call under timeout_s
               └─► sync: in a worker process of its own, which a call that is late or ends it takes with it

Whatever an environment does wrong is EnvironmentFailed, of its own trajectory only. An error or delay in
closing is nobody's: what came before it counts, and a worker is killed.
"""

import inspect
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import trio

from rollouts.environments.protocol import Observation, Tool, World
from rollouts.environments.tools import bind_tool, make_tool
from rollouts.environments.worker import check_answer
from rollouts.errors import EnvironmentFailed, ToolError
from rollouts.rewards.call import call_user, find_own
from rollouts.rewards.check import function_name, import_extra, is_async
from rollouts.rewards.workers import Workers
from rollouts.types import Function, JSONValue, RewardResult

OPEN_S = 60.0  # for an MCP server to start
CLOSE_S = 10.0  # for what was opened to close, also where the block was cancelled
MCP = "mcp:"  # begins an entry of rl.rollout.tools that names a server and no function


@asynccontextmanager
async def open_world(
    row: JSONValue, *, opener: Function, request: JSONValue, workers: Workers, timeout_s: float
) -> AsyncIterator[World]:
    """The environment that `opener` opens for a dataset row: in this loop if it is an async function, an
    asynccontextmanager or a class with an async step; else in one of the workers, which run
    rollouts.environments.worker and load what `request` names.

    Neither waiting for a worker nor entering an asynccontextmanager is under `timeout_s`.
    """
    what, step = f"environment {function_name(opener)}", getattr(opener, "step", opener)

    async def host(stack: AsyncExitStack) -> Any:
        """Its tools, and what calls a method by its name."""
        if is_async(step) or inspect.isasyncgenfunction(inspect.unwrap(opener)):
            call = partial(call_user, timeout_s=timeout_s, kind=EnvironmentFailed, threads=False)

            def ask(method: str, *arguments: Any) -> Any:
                return call(getattr(held, method, lambda *_: None), *arguments, where=f"{what}: {method}")

            held = await call(opener, row, where=f"{what}: open")
            if hasattr(held, "__aenter__"):
                held = await stack.enter_async_context(held)
            else:
                stack.push_async_callback(ask, "close")
            tools = getattr(held, "tools", ())
            return [tool if isinstance(tool, Tool) else make_tool(tool) for tool in tools], ask
        lent = await stack.enter_async_context(workers.lend())

        async def ask_worker(method: str, *arguments: Any) -> Any:
            asked = {**request, "method": method, "arguments": arguments, "error": "environment"}
            value = await lent(asked, f"{what}: {method}")
            if method == "step":
                return Observation(**value | {"reward": value["reward"] and RewardResult(**value["reward"])})
            return RewardResult(**value) if method == "score" and value else value

        schemas = await ask_worker("open", row)
        stack.push_async_callback(ask_worker, "close")
        return [bind_tool(schema, lent, request) for schema in schemas], ask_worker

    async with open_apart(host, what) as (tools, ask):

        async def call(method: str, *arguments: Any) -> Any:
            return check_answer(await ask(method, *arguments), method, f"{what}: {method}")

        yield World(tools, call)


# --- MCP servers --------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_mcp_tools(source: str, timeout_s: float) -> AsyncIterator[list[Tool]]:
    """The tools of a server, for as long as the context is open: its http(s) address, or a command, which is
    started without a shell, with PATH, HOME and little else of this process's environment.

    `timeout_s` is a call's, which call_tools keeps. A command that ignores the end of its input outlives a
    trainer that is killed. Raises ConfigError without the SDK, EnvironmentFailed if the server does not open.
    """
    mcp, (command, *words) = import_extra("mcp", source, "mcp"), shlex.split(source)
    server = source if "://" in command else mcp.StdioServerParameters(command=command, args=words)
    client = mcp.Client(server, read_timeout_seconds=timeout_s + OPEN_S)

    async def call(name: str, arguments: JSONValue) -> str:
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            raise EnvironmentFailed(f"MCP server {source!r} failed in {name}: {error!r}") from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError("failed", text)
        return text

    async with open_apart(lambda stack: stack.enter_async_context(client), f"MCP server {source!r}"):
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
    if not ended:
        if isinstance(broken, EnvironmentFailed):
            raise broken
        raise EnvironmentFailed(f"{what} did not stay open: {broken!r}") from broken
