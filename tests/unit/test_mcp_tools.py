"""Tools of MCP servers, with the official SDK on both sides: real processes, real time."""

import json
import sys
from functools import partial
from pathlib import Path

import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config

from rollouts.environments.worlds import open_mcp_tools
from rollouts.errors import EnvironmentFailed, PlugInError
from rollouts.preflight.functions import Functions, open_functions
from tests.support.processes import find_descendants
from tests.support.text_tables import cases
from tests.unit.hostile_worlds import use
from tests.unit.mcp_server import server
from tests.unit.test_worlds import make_config

COMMAND = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


async def test_a_server_over_stdio_answers_refuses_hangs_and_dies():
    before = find_descendants()
    async with open_mcp_tools(COMMAND, 30) as tools:
        function = tools[0].schema["function"]
        assert (function["description"], function["parameters"]["required"]) == ("Adds two numbers.", [*"ab"])
        calls = '[["add", {"a": 1, "b": 2}], ["lines", {}], ["add", {"a": "x", "b": 2}]]'
        results = await use(tools, json.loads(calls))
        assert results[:2] == [("ok", "3"), ("ok", "one\ntwo")]
        assert results[2][0] == "failed" and "Error executing tool add: 1 validation" in results[2][1]
        hung = await use(tools, [("hang", {})], timeout_s=0.5)
        assert hung == [("timeout", "Error: hang took longer than 0.5 s")]
        for name in ("die", "lines"):
            said = f"MCP server .* failed in {name}: .*Connection closed"
            with pytest.raises(EnvironmentFailed, match=said):
                await use(tools, [(name, {})])
    assert find_descendants() <= before


@cases("command: true no_such_program_here http://127.0.0.1:9/mcp")
async def test_a_server_that_does_not_open_is_named(command):
    with pytest.raises(EnvironmentFailed, match=f"^MCP server '{command}' did not stay open: "):
        async with open_mcp_tools(command, 30):
            pass


async def test_two_tools_of_one_name_are_refused_and_cancellation_ends_the_servers():
    before, config = find_descendants(), make_config(tools=[f"mcp:{COMMAND}"] * 2)
    with pytest.raises(PlugInError, match=r"rl.rollout.tools: two have one name: \['add', 'hang'"):
        async with open_functions(config, Functions(), warn=print):
            pass
    async with open_mcp_tools(COMMAND, 30) as tools:
        with trio.move_on_after(0.2) as scope:
            await use(tools, [("hang", {})])
    assert scope.cancelled_caught
    assert find_descendants() <= before


async def test_a_server_over_http(nursery):
    config = Config()
    config.bind = ["127.0.0.1:0"]
    (address,) = await nursery.start(partial(hypercorn.trio.serve, server.streamable_http_app(), config))
    async with open_mcp_tools(f"{address}/mcp", 30) as tools:
        assert await use(tools, [("add", {"a": 1, "b": 2})]) == [("ok", "3")]
    nursery.cancel_scope.cancel()
