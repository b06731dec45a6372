"""Games on a real OpenEnv server."""

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio_websocket import ConnectionClosed

from rollouts.environments.adapters.openenv_games import open_openenv
from rollouts.environments.protocol import Turn
from rollouts.errors import EnvironmentFailed
from tests.adapters.programs import OPENENV, run_server

pytestmark = pytest.mark.adapters
ROW = {"prompt": "Be quick.", "seed": 4, "reset": {"most": 6}}  # the secret is 5


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with run_server(OPENENV, "guess_server.py") as (port, _):
        yield port


def read_guess(text: str) -> dict[str, Any]:
    if not text:
        raise ValueError("say a number")
    return {"number": text}  # which the server checks


def open_game(port: int) -> Any:
    url = f"http://127.0.0.1:{port}"
    return open_openenv(url, to_text=lambda seen: seen["text"], to_action=read_guess)(ROW)


async def say(game, text: str) -> Any:
    seen = await game.step(Turn(message={"role": "assistant", "content": text}, text=text))
    return seen if isinstance(seen, str) else (seen.messages, seen.reward, seen.done)


async def test_a_game_is_played_from_the_seed_to_its_end(port):
    async with open_game(port) as game:
        assert game.reset() == [{"role": "user", "content": "Be quick.\n\nGuess a number up to 6."}]
        assert await say(game, "") == "Error: say a number"
        assert (await say(game, "five")).startswith("Error: Input should be a valid integer")
        assert await say(game, "7") == ("wrong", None, False)
        assert await say(game, "5") == ("right", 1.0, True)


async def test_a_full_server_is_waited_for(port):
    opened: list[int] = []

    async def play(number, task_status=trio.TASK_STATUS_IGNORED):
        async with open_game(port) as game:
            opened.append(number)
            task_status.started()
            await say(game, "77")

    async with trio.open_nursery() as nursery:
        for number in range(2):
            await nursery.start(play, number)
        nursery.start_soon(play, 2)
    assert opened == [0, 1, 2]


async def test_a_connection_outlives_pings_while_nobody_asks(port):
    async with open_game(port) as quiet, open_game(port) as other:
        await say(other, "77")
        assert await say(quiet, "5") == ("right", 1.0, True)


async def test_a_cancelled_call_closes_its_connection(port):
    async with open_game(port) as game:
        with trio.move_on_after(0.5):
            await say(game, "77")
        with pytest.raises(ConnectionClosed):
            await say(game, "5")


async def test_a_game_that_breaks_is_named(port):
    async with open_game(port) as game:
        with pytest.raises(EnvironmentFailed, match="the game fell down"):
            await say(game, "99")
