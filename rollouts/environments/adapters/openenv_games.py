"""Environments that an OpenEnv server keeps, one WebSocket each, one step a turn; the extra openenv.

    open ──► connect ─┬─ the server is full: wait, connect again
                      └─ reset ──► step ──► step … ──► hang up, which frees the server's environment

A file that the config names, by environment = "echo.py:open_echo":

    open_echo = open_openenv(
        "http://localhost:8000",
        to_text=lambda observation: observation["echoed_message"],
        to_action=lambda text: {"message": text},
    )
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_client_stream

from rollouts.environments.adapters.game_rows import Row, begin_game, compute_seed
from rollouts.environments.protocol import Observation, Turn
from rollouts.errors import EnvironmentFailed
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.types import JSONValue


def open_openenv(
    url: str, *, to_text: Callable[[JSONValue], str], to_action: Callable[[str], JSONValue]
) -> Callable[[Row], AbstractAsyncContextManager[SimpleNamespace]]:
    """A function from a row to a game on the server at this address, http or https. Where the server is full
    it waits, as long as the caller does.

    to_text: from an observation's fields to what the model reads; the first follows the row's prompt, which
    may tell the rules. to_action: from what the model said to an action's fields; raises ValueError, in words
    for the model, where it is none. The environment's reset gets the row's `seed`, or one that follows from
    its prompt_id and epoch, and what the row has as `reset`.
    """

    async def step(connection: WebSocketConnection, turn: Turn) -> Observation | str:
        """What is no action is a turn without a step, after which the model reads why."""
        try:
            seen = await ask(connection, "step", to_action(turn.message["content"]))
        except ValueError as error:
            return f"Error: {error}"
        return Observation(messages=to_text(seen["observation"]), reward=seen["reward"], done=seen["done"])

    @asynccontextmanager
    async def open_game(row: Row) -> AsyncIterator[SimpleNamespace]:
        wait_s = 0.1
        while True:
            async with open_connection(f"{url}/ws") as connection:
                with suppress(trio.WouldBlock):
                    seen = await ask(connection, "reset", {"seed": compute_seed(row), **row.get("reset", {})})
                    first = begin_game(row, to_text(seen["observation"]))
                    yield SimpleNamespace(reset=partial(list, first), step=partial(step, connection))
                    return
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)

    return open_game


@asynccontextmanager
async def open_connection(url: str) -> AsyncIterator[WebSocketConnection]:
    """A WebSocket that answers pings: a server closes one that is silent while a model writes its turn."""
    at = urlsplit(url)
    secure = at.scheme == "https"
    connect = trio.open_ssl_over_tcp_stream if secure else trio.open_tcp_stream
    # trio_websocket's own open_websocket leaves a socket open that the server closed first. Neither notices
    # a server that hangs up before it has answered the first request: the caller's time ends that.
    stream = await connect(at.hostname or "", at.port or (443 if secure else 80))
    async with stream, open_plain_nursery() as nursery:
        yield await wrap_client_stream(nursery, stream, at.netloc, at.path)


async def ask(connection: WebSocketConnection, kind: str, message: JSONValue) -> JSONValue:
    """The data of the server's answer. A call that is cancelled closes the connection, for an answer does not
    say to what. Raises ConnectionClosed; EnvironmentFailed; ValueError for an action that the server does not
    take; WouldBlock where all its environments are in use.
    """
    try:
        with suppress(ConnectionClosed):  # the server may have said why before it closed
            await connection.send_message(json.dumps({"type": kind, "data": message}))
        reply = json.loads(await connection.get_message())
    except trio.Cancelled:
        # not by a closing frame: the pong to a ping that crosses it would raise in the connection's own task
        await trio.aclose_forcefully(connection._stream)
        raise
    answer = reply["data"]
    if reply["type"] == "error":
        errors = {"VALIDATION_ERROR": ValueError, "CAPACITY_REACHED": trio.WouldBlock}
        said = answer.get("errors", [{"msg": answer["message"]}])
        raise errors.get(answer["code"], EnvironmentFailed)("; ".join(one["msg"] for one in said))
    return answer
