"""Calls to one server: what a status means, and how long an answer is awaited."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec
import trio

from rollouts.engines.http import HttpClient
from rollouts.engines.wire import decode_reply, show
from rollouts.errors import EngineError, EngineOverloaded, EngineSilent, InfrastructureError, RequestRefused
from rollouts.processes.nurseries import run_all

START_S = 600.0  # for a server to be ready, and for its first answer, for which it may have to compile
REPEAT_S = 1.0  # before a control call is sent for the third time
HEALTH_S = 10.0  # for the answer to whether a server is well; less where silence_s is
ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class Server:
    """Calls to one server."""

    client: HttpClient
    name: str
    silence_s: float  # seconds without a byte, and without progress, after which an answer is given up
    health_path: str
    cold: bool = True  # it has generated nothing since it was opened or came back: all may take START_S

    async def call(
        self, method: str, path: str, body: Any = None, *, silence_s: float | None = None
    ) -> bytes:
        """The body of a 2xx answer. `body` is sent as JSON. Raises what `check_status` raises,
        EngineUnreachable, EngineSilent, ReplyError.
        """
        sent = None if body is None else msgspec.json.encode(body)
        silence_s = silence_s or max(self.silence_s, self.cold * START_S)
        reply = await self.client.request(method, path, body=sent, silence_s=silence_s)
        check_status(reply, where=f"{self.name}: {method} {path}")
        return reply.content

    async def read(self, path: str, kind: type[ResultT], field: str = "") -> ResultT:
        """The record in the answer to GET `path`, or in one field of it. Like every call that only reads, it
        is repeated as `control` says. Raises as call, and ReplyError.
        """
        answer = await _repeat(lambda: self.call("GET", path))
        return decode_reply(answer, kind, field=field, where=f"{self.name}: GET {path}")

    async def control(
        self, path: str, body: Any = None, kind: Any = None, field: str = "", *, repeats: bool = False
    ) -> Any:
        """What `read` returns, of a POST that may take long, awaited for as long as the server is well; None
        without a `kind`. A refusal is EngineError: a control call carries no request at fault.

        repeats: the call is sent again at once, and a third time REPEAT_S later, when the server or the way
        to it fails (5xx, 408, 429, a broken connection, a cut answer): a single 503 of a proxy must not take
        the only server out of service. It is for calls that leave the server the same however often they
        arrive, since one that gave 500 may have been carried out: pausing and resuming, naming the weights,
        resetting a cache, aborting given requests, a checksum. It is not for calls in which the trainer
        takes part (transfers of weights in memory), that count (sleep, wake up), or that take minutes
        (loading: what failed it would fail it again, and the next update repeats it). After a silence
        nothing is repeated.
        """
        where = f"{self.name}: POST {path}"

        async def ask() -> bytes:
            return await ask_watched(
                lambda: self.call("POST", path, body, silence_s=math.inf),
                self.health,
                silence_s=self.silence_s,
                where=where,
            )

        try:
            reply = await (_repeat(ask) if repeats else ask())
        except RequestRefused as error:
            raise EngineError(str(error)) from error
        return None if kind is None else decode_reply(reply, kind, field=field, where=where)

    async def health(self) -> bool:
        """Whether the health path gives 2xx within HEALTH_S."""
        try:
            await self.call("GET", self.health_path, silence_s=min(self.silence_s, HEALTH_S))
        except EngineError:
            return False
        return True


async def _repeat(ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """What `ask()` returns, asked up to three times. Raises what the last one raises, and EngineSilent and
    what is no InfrastructureError at once.
    """
    for wait_s in (0.0, REPEAT_S):
        try:
            return await ask()
        except EngineSilent:
            raise
        except InfrastructureError:
            await trio.sleep(wait_s)
    return await ask()


async def ask_watched(
    ask: Callable[[], Awaitable[ResultT]],
    works: Callable[[], Awaitable[bool]],
    *,
    silence_s: float,
    where: str,
    way_out: str = "",
) -> ResultT:
    """What `ask()` returns. Every `silence_s` a task beside it asks whether the server `works()`; if not,
    `ask()` is cancelled. Raises what both raise, and EngineSilent.
    """
    answers: list[ResultT] = []

    async def wait_answer() -> None:
        answers.append(await ask())
        answered.cancel()

    async def watch() -> None:
        while True:
            await trio.sleep(silence_s)
            if not await works():
                raise EngineSilent(f"{where}: no answer and no progress for {silence_s:g} s{way_out}")

    with trio.CancelScope() as answered:
        await run_all(wait_answer, watch)
    return answers[0]


def check_status(reply: httpx.Response, *, where: str) -> None:
    """Raises unless the status is 2xx: EngineOverloaded for 429 and 503, InfrastructureError for 5xx and 408,
    RequestRefused for other 4xx.

    401, 403, 404 and redirects are EngineError: they are about the server's address, key and version, and no
    other request will fare better.
    """
    status, text = reply.status_code, f"{where} gave {reply.status_code}: {show(reply.content)}"
    if reply.is_success:
        return
    if status in (429, 503):
        value = reply.headers.get("retry-after", "").strip()  # seconds; dates are ignored
        seconds = float(value) if value.isascii() and value.isdecimal() else None
        raise EngineOverloaded(text, retry_after_s=seconds)
    if status >= 500 or status == 408:  # it waited for the request in vain; a proxy says so for its server
        raise InfrastructureError(text)
    if status in (401, 403, 404) or status < 400:
        raise EngineError(text)
    raise RequestRefused(text)
