"""Tools of MCP servers, by the official SDK, which the extra `mcp` installs."""

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rollouts.environments.protocol import Tool
from rollouts.environments.worlds import open_apart
from rollouts.errors import EnvironmentFailed, ToolError
from rollouts.rewards.check import describe, import_extra
from rollouts.types import JSONValue

OPEN_S = 60.0  # for a server to start


@asynccontextmanager
async def open_mcp_tools(source: str, *, timeout_s: float) -> AsyncIterator[list[Tool]]:
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
