"""An MCP server over stdio, by the official SDK, for test_mcp_tools.py."""

import os
import sys

import anyio
from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
async def hang() -> str:
    await anyio.sleep_forever()
    return ""


@server.tool()
def die() -> str:
    os._exit(3)


@server.tool()
def lines() -> list[str]:
    return ["one", "two"]


if __name__ == "__main__":
    print("started", file=sys.stderr)
    server.run("stdio")
