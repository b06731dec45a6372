"""Tools of MCP servers, with the official SDK on both sides: real processes, real time."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config

from rollouts.environments.tools import ToolResult, call_tools
from rollouts.environments.worlds import open_mcp_tools
from rollouts.errors import EnvironmentFailed
from tests.support.processes import find_descendants
from tests.unit.mcp_server import server

COMMAND = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


async def ask(tools: Any, name: str, arguments: Any, *, timeout_s: float = 30) -> ToolResult:
    call = {"id": "c0", "function": {"name": name, "arguments": arguments}}
    return (await call_tools([call], tools, timeout_s=timeout_s))[0]


async def test_a_server_over_stdio_answers_refuses_hangs_and_dies():
    before = find_descendants()
    async with open_mcp_tools(COMMAND, 30) as tools:
        assert [tool.name for tool in tools] == ["add", "hang", "die", "lines"]
        function = tools[0].schema["function"]
        assert (function["description"], function["parameters"]["required"]) == (
            "Adds two numbers.",
            ["a", "b"],
        )
        for name, arguments, outcome, content in (
            ("add", {"a": 1, "b": 2}, "ok", "3"),
            ("lines", {}, "ok", "one\ntwo"),
            ("add", {"a": "x", "b": 2}, "failed", "Error: Error executing tool add: 1 validation error"),
        ):
            result = await ask(tools, name, arguments)
            assert result.outcome == outcome
            assert result.message["content"].startswith(content)
        hung = await ask(tools, "hang", {}, timeout_s=0.5)
        assert (hung.outcome, hung.message["content"]) == ("timeout", "Error: hang took longer than 0.5 s")
        assert (await ask(tools, "add", {"a": 2, "b": 2})).message["content"] == "4"
        for name in ("die", "lines"):
            with pytest.raises(
                EnvironmentFailed, match=f"MCP server .* failed in {name}: .*Connection closed"
            ):
                await ask(tools, name, {})
    assert find_descendants() <= before


@pytest.mark.parametrize("command", ["true", "no_such_program_here", "http://127.0.0.1:9/mcp"])
async def test_a_server_that_does_not_open_is_named(command: str):
    with pytest.raises(EnvironmentFailed, match=f"^MCP server '{command}' did not stay open: "):
        async with open_mcp_tools(command, 30):
            raise AssertionError("opened")


async def test_an_error_of_the_block_comes_out_as_it_is_and_cancellation_ends_the_server():
    before = find_descendants()
    with pytest.raises(KeyError, match="mine"):
        async with open_mcp_tools(COMMAND, 30):
            raise KeyError("mine")
    with trio.CancelScope() as scope:
        async with open_mcp_tools(COMMAND, 30) as tools, trio.open_nursery() as nursery:
            nursery.start_soon(partial(ask, tools, "hang", {}))
            await trio.sleep(0.2)
            scope.cancel()
    assert scope.cancelled_caught
    assert find_descendants() <= before


async def test_a_server_over_http(nursery: trio.Nursery):
    config = Config()
    config.bind = ["127.0.0.1:0"]
    (address,) = await nursery.start(partial(hypercorn.trio.serve, server.streamable_http_app(), config))
    async with open_mcp_tools(f"{address}/mcp", 30) as tools:
        assert (await ask(tools, "add", {"a": 1, "b": 2})).message["content"] == "3"
        assert (await ask(tools, "hang", {}, timeout_s=0.2)).outcome == "timeout"
    nursery.cancel_scope.cancel()
