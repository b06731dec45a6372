"""What all HTTP engines do on this side of the wire, seen through a server in this process that answers, or
does not, as a test wants it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.engines.http import HttpReply
from rollouts.engines.server import EngineServer, Progress, check_status
from rollouts.errors import EngineError, EngineOverloaded, EngineSilent, InfrastructureError, RequestRefused
from rollouts.testing.engine_contracts import make_request
from rollouts.types import Completion, EngineFeatures, GenerateRequest

FEATURES = EngineFeatures(10, 64, False, True, False, True, False, name="s")
SILENCE_S = 60.0


class Silent:
    """A server that answers nobody in `lost`, everybody else after `seconds`, and says what it works on."""

    def __init__(self, *, lost: tuple[str, ...] = (), seconds: float = 100.0) -> None:
        self.lost = lost
        self.seconds = seconds
        self.has = 0  # requests

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        silence_s: float = 60.0,
    ) -> HttpReply:
        lost = path.rpartition("/")[2] in self.lost
        self.has += not lost
        try:
            with trio.move_on_after(silence_s):
                await trio.sleep(math.inf if lost else self.seconds)
                return HttpReply(200, {}, b"")
            raise EngineSilent(f"{path} was silent")
        finally:
            self.has -= not lost

    async def read_progress(self) -> Progress:
        await trio.lowlevel.checkpoint()
        return Progress(trio.current_time(), requests=self.has)  # it is at work at all times

    def statistics(self) -> dict[str, float]:
        return {}


def make_completion(request: GenerateRequest) -> Completion:
    one = np.ones(1, np.int64)
    return Completion(
        request_id=request.request_id,
        token_ids=one,
        log_probs=-np.ones(1, np.float32),
        weight_versions=one,
        finish_reason="stop",
    )


async def generate(server: EngineServer, client: Silent, name: str) -> str:
    """How the request ended."""

    async def ask(request: GenerateRequest, server_id: str) -> Completion:
        await server.call_generate(f"/generate/{name}", None, client.read_progress)
        return make_completion(request)

    try:
        return (await server.run(make_request(name), FEATURES, ask)).finish_reason
    except EngineSilent as error:
        return str(error)


async def test_a_request_that_the_server_lost_is_given_up_while_it_works_for_others(
    autojump_clock: trio.testing.MockClock,
):
    client = Silent(lost=("lost",))
    server = EngineServer(client, name="s", silence_s=SILENCE_S)
    ended: dict[str, tuple[str, float]] = {}

    async def one(name: str) -> None:
        ended[name] = (await generate(server, client, name), trio.current_time())

    async with trio.open_nursery() as nursery:
        begun_s = trio.current_time()
        nursery.start_soon(one, "lost")
        await trio.sleep(5)
        for index in range(
            20
        ):  # one new request every 31 s, each takes 100 s: three or four are at the server at all times
            nursery.start_soon(one, f"other-{index}")
            await trio.sleep(31)
    how, when_s = ended.pop("lost")
    assert "has lost request 'lost'" in how
    assert (
        SILENCE_S <= when_s - begun_s <= 6 * SILENCE_S
    )  # a look within a second of another's arrival tells nothing
    assert {how for how, _ in ended.values()} == {"stop"}


async def test_a_request_alone_that_the_server_lost_is_given_up(autojump_clock: trio.testing.MockClock):
    client = Silent(lost=("lost",))
    server = EngineServer(client, name="s", silence_s=SILENCE_S)
    with trio.fail_after(4 * SILENCE_S):
        assert "has lost request 'lost'" in await generate(server, client, "lost")
    assert server.sent() == {}


async def test_long_answers_of_a_server_that_counts_them_are_awaited(autojump_clock: trio.testing.MockClock):
    client = Silent(seconds=3600.0)
    server = EngineServer(client, name="s", silence_s=SILENCE_S)
    hows: list[str] = []

    async def one(name: str) -> None:
        hows.append(await generate(server, client, name))

    async with trio.open_nursery() as nursery:
        for index in range(10):
            nursery.start_soon(one, str(index))
            await trio.sleep(7)
    assert hows == ["stop"] * 10


async def test_one_look_that_counts_too_few_gives_nothing_up(autojump_clock: trio.testing.MockClock):
    client = Silent(seconds=1000.0)
    server = EngineServer(client, name="s", silence_s=SILENCE_S)
    looks: list[int] = []

    async def read_progress() -> Progress:
        looks.append(len(looks))
        return Progress(len(looks), requests=len(looks) % 2)  # 1, 0, 1, 0, ...

    client.read_progress = read_progress  # pyright: ignore[reportAttributeAccessIssue]
    assert await generate(server, client, "a") == "stop"
    assert len(looks) > 4


async def test_an_abort_call_that_fails_leaves_nobody_in_flight(autojump_clock: trio.testing.MockClock):
    client = Silent(seconds=3600.0)
    server = EngineServer(client, name="s", silence_s=SILENCE_S)
    hows: list[str] = []

    async def one() -> None:
        hows.append(await generate(server, client, "a"))

    async def send_abort(server_ids: list[str]) -> None:
        raise InfrastructureError("the abort call gave 500")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(6), pytest.raises(InfrastructureError, match="gave 500"):
            await server.abort(send_abort)
        assert server.sent() == {}
    assert hows == ["abort"]


async def test_an_abort_call_that_fails_once_is_said_again(autojump_clock: trio.testing.MockClock):
    client = Silent(seconds=1.5)
    server = EngineServer(client, name="s", silence_s=SILENCE_S)
    said: list[int] = []

    async def send_abort(server_ids: list[str]) -> None:
        said.append(len(server_ids))
        if len(said) == 1:
            raise InfrastructureError("the abort call gave 500")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate, server, client, "a")
        await trio.testing.wait_all_tasks_blocked()
        await server.abort(send_abort)
    assert said == [1, 1]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_pause_that_fails_leaves_the_gate_as_it_was(paused: bool):
    server = EngineServer(Silent(), name="s", silence_s=SILENCE_S)
    if paused:
        server.close_gate()

    def pause() -> None:
        with server.pausing():
            server.close_gate(frozen=False)
            raise InfrastructureError("no")

    with pytest.raises(InfrastructureError):
        pause()
    assert server.paused is paused


async def test_a_resume_that_fails_leaves_nobody_waiting_at_the_gate(autojump_clock: trio.testing.MockClock):
    client = Silent(seconds=1.0)
    server = EngineServer(client, name="s", silence_s=SILENCE_S)
    server.close_gate()
    hows: list[str] = []

    async def one() -> None:
        hows.append(await generate(server, client, "a"))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(InfrastructureError), server.resuming():
                raise InfrastructureError("no")
    assert hows == ["stop"]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -5}, "max_new_tokens=-5"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids has -1"),
        ({"stop_token_ids": (10,)}, "stop_token_ids has 10"),
        ({"prompt": (1, 10)}, "prompt_ids holds 10"),
        ({"prompt": ()}, "at least one token"),
        ({"max_new_tokens": 62}, "make 65"),
    ],
)
async def test_what_no_server_may_be_sent_is_refused_before_it_is(sampling: dict[str, Any], field: str):
    server = EngineServer(Silent(), name="s", silence_s=SILENCE_S)

    async def ask(request: GenerateRequest, server_id: str) -> Completion:
        raise AssertionError("it was sent")

    with pytest.raises(RequestRefused, match=field):
        await server.run(make_request(**sampling), FEATURES, ask)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, EngineError),
        (307, EngineError),
        (400, RequestRefused),
        (401, EngineError),
        (404, EngineError),
        (408, InfrastructureError),
        (422, RequestRefused),
        (429, EngineOverloaded),
        (500, InfrastructureError),
        (502, InfrastructureError),
        (503, EngineOverloaded),
    ],
)
def test_a_status_says_who_is_at_fault(status: int, kind: type[Exception]):
    with pytest.raises(EngineError) as raised:
        check_status(HttpReply(status, {}, b"no"), where="s")
    assert type(raised.value) is kind
