"""What every HTTP engine does on this side of the wire: who may be asked, who is in flight, what a status
means, when silence is a failure.

    generate() ──► check ──► gate ──► ask(request, server_id) ──► Completion
                   refuses    closed between pause() and resume()
                              abort_all(): whoever waits here is answered at once, with nothing

A server is asked under ids of our own making: fixed-width hex, because SGLang aborts every id that begins
with the one it is given. What would kill a server (an id outside the vocabulary) or be refused by it (a
prompt too long) never leaves this process.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import trio

from rollouts.engines.http import HttpReply
from rollouts.engines.wire import decode_reply, make_empty_completion, show
from rollouts.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    EngineSilent,
    InfrastructureError,
    RequestRefused,
)
from rollouts.models.requests import check_request
from rollouts.types import Completion, EngineFeatures, GenerateRequest

# for a server to answer what it was told to abort; after it the connection is closed, which aborts too
ABORT_GRACE_S = 5.0
ABORT_AGAIN_S = 1.0  # an abort that overtook its request on the way names nobody; it is said again
HEALTH_S = 10.0  # for the answer to whether a server is well; less where silence_s is
ARRIVED_S = 1.0  # after which a request that was sent should be among those that its server counts
ResultT = TypeVar("ResultT")
Ask = Callable[[GenerateRequest, str], Awaitable[Completion]]
"""The completion of one request, sent under a server-side id."""


class Client(Protocol):
    """What HttpClient does."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        silence_s: float = ...,
    ) -> HttpReply: ...
    def statistics(self) -> Mapping[str, float]: ...


class Progress(NamedTuple):
    """What a server says of its work."""

    work: Hashable  # differs from what it was if anything was done since
    requests: int | None  # that it has, running or waiting, ours and others'; None: it cannot tell now


@dataclass(slots=True, eq=False)
class _InFlight:
    request: GenerateRequest
    server_id: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    asked_s: float | None = None  # when it passed the gate
    aborted: bool = False
    lost: bool = False  # the server has forgotten it

    @property
    def asked(self) -> bool:
        return self.asked_s is not None


class EngineServer:
    """One server as its engine sees it. Used by ServerEngine; lives as long as its HTTP
    client.
    """

    def __init__(self, client: Client, *, name: str, silence_s: float) -> None:
        """`silence_s`: seconds without a byte, and without progress, after which an answer is given up."""
        self.client = client
        self.name = name
        self.silence_s = silence_s
        self._in_flight: dict[str, _InFlight] = {}
        self._paused = False
        self._frozen = False
        self._closed = False
        self._changed = trio.Event()
        self._progress: tuple[float, Hashable] | None = None
        self._suspects: frozenset[str] = (
            frozenset()
        )  # server ids of requests that the server did not seem to have when it was last asked
        self._finished = 0

    # --- calls ----------------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        silence_s: float | None = None,
    ) -> bytes:
        """The body of a 2xx answer. `body` is sent as JSON. Raises what `check_status` raises,
        EngineUnreachable, EngineSilent, ReplyError.
        """
        self.check_open()
        sent = None if body is None else msgspec.json.encode(body)
        reply = await self.client.request(method, path, body=sent, silence_s=silence_s or self.silence_s)
        check_status(reply, where=f"{self.name}: {method} {path}")
        return reply.body

    async def read(self, path: str, kind: type[ResultT], *, show_body: bool = True) -> ResultT:
        """The record in the answer to GET `path`. Raises as call, and ReplyError."""
        where = f"{self.name}: GET {path}"
        return decode_reply(await self.call("GET", path), kind, where=where, show_body=show_body)

    async def call_generate(
        self, path: str, body: Any, read_progress: Callable[[], Awaitable[Hashable]]
    ) -> bytes:
        """The answer to a generate call, awaited while the server makes progress or is paused by us."""
        return await ask_watched(
            lambda: self.call("POST", path, body, silence_s=math.inf),
            lambda: self._moved(read_progress),
            silence_s=self.silence_s,
            where=f"{self.name}: POST {path}",
        )

    async def health(self, path: str) -> bool:
        """Whether `path` gives 2xx within HEALTH_S."""
        try:
            await self.call("GET", path, silence_s=min(self.silence_s, HEALTH_S))
        except EngineError:
            return False
        return True

    async def _moved(self, read_progress: Callable[[], Awaitable[Hashable]]) -> bool:
        """Whether the server did any work since it was last asked; asked once for all who wait. A frozen
        server need not.

        Where it counts its requests (read_progress gives a Progress), those that it has lost are given up on
        the way.
        """
        if self._frozen:
            return True
        now, last = trio.current_time(), self._progress
        if last is not None and now - last[0] < self.silence_s / 2:
            return True
        self._progress = (now, None)  # whoever comes while we ask waits another round
        try:
            value = await read_progress()
        except InfrastructureError as error:
            raise EngineSilent(
                f"{self.name} sent nothing for {self.silence_s:g} s and does not say how far it is: {error}"
            ) from error
        if isinstance(value, Progress):
            if value.requests is not None and not self._frozen:
                self._give_up_lost(value.requests, asked_before_s=now - ARRIVED_S)
            value = value.work
        self._progress = (now, value)
        return last is None or last[1] is None or value != last[1]

    def _give_up_lost(self, count: int, *, asked_before_s: float) -> None:
        """Ends what the server, which has `count` requests, did not have at two looks in a row: it works on,
        but never for these.

        Which ones it lost it does not say. Whatever is lost grows old while others are answered, so it is
        sought among the oldest, and only among those that were silent for silence_s.
        """
        ours = [
            entry
            for entry in self._in_flight.values()
            if entry.asked_s is not None and entry.asked_s <= asked_before_s
        ]
        ours.sort(key=lambda entry: entry.asked_s or 0.0)
        missing = ours[: max(0, len(ours) - count)]
        suspects, self._suspects = self._suspects, frozenset(entry.server_id for entry in missing)
        silent_since_s = trio.current_time() - self.silence_s
        for entry in missing:
            if entry.server_id in suspects and not entry.aborted and (entry.asked_s or 0.0) <= silent_since_s:
                entry.lost = True
                entry.scope.cancel()

    # --- requests -------------------------------------------------------------------------------------------

    async def run(self, request: GenerateRequest, features: EngineFeatures, ask: Ask) -> Completion:
        """`ask`, when the gate is open. Raises RequestRefused before anything is sent, EngineClosed, and what
        `ask` raises.
        """
        self.check_open()
        check_request(request, vocab_size=features.vocab_size, max_context=features.context_length)
        if request.request_id in self._in_flight:
            raise RequestRefused(
                f"request {request.request_id!r} is in flight on {features.name} already; ids must be unique"
            )
        entry = self._in_flight[request.request_id] = _InFlight(request, uuid.uuid4().hex)
        completion: Completion | None = None
        try:
            with entry.scope:
                await self._pass_gate(entry)
                if not entry.aborted:
                    completion = await ask(request, entry.server_id)
                    self._finished += 1
        finally:
            del self._in_flight[request.request_id]
            self.notify()
        if completion is not None:
            return completion
        self.check_open()
        if entry.lost and not entry.aborted:
            raise EngineSilent(
                f"{self.name} has lost request {request.request_id!r}: it works, and counts fewer requests"
                " than it was sent"
            )
        return make_empty_completion(request)

    async def _pass_gate(self, entry: _InFlight) -> None:
        while self._paused and not entry.aborted and not self._closed:
            await self._changed.wait()
        self.check_open()
        entry.asked_s = trio.current_time()

    def close_gate(self, *, frozen: bool = True) -> None:
        """New requests wait from now on. `frozen`: those at the server stand still too, so that its silence
        says nothing.
        """
        self._paused = True
        self._frozen = frozen
        self._progress = None
        self._suspects = frozenset()

    def open_gate(self) -> None:
        self._paused = False
        self._frozen = False
        self._progress = None  # what stood still while it was paused may begin anew
        self._suspects = frozenset()
        self.notify()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Around what pauses the server: if that fails or is cancelled, the gate is as open, and the server
        taken to be as frozen, as before.
        """
        paused, frozen = self._paused, self._frozen
        try:
            yield
        except BaseException:
            if paused:
                self._frozen = frozen
            else:
                self.open_gate()
            raise

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Around what lets the server go on. The gate opens even if that fails: behind a gate that nobody
        opens again, requests would wait for ever, while the server answers them, or fails to, within
        silence_s.
        """
        try:
            yield
        finally:
            self.open_gate()

    @property
    def paused(self) -> bool:
        return self._paused

    def sent(self) -> dict[str, str]:
        """Request ids that the server has, or will have in a moment, with its names for them."""
        return {name: entry.server_id for name, entry in self._in_flight.items() if entry.asked}

    async def wait_answered(self, names: Mapping[str, str]) -> None:
        """Returns when none of `names`, from sent(), is in flight any more."""
        while any(
            name in self._in_flight and self._in_flight[name].server_id == server_id
            for name, server_id in names.items()
        ):
            await self._changed.wait()

    async def abort(self, send_abort: Callable[[list[str]], Awaitable[None]]) -> None:
        """Answers everyone: who waits at the gate with nothing, who is at the server with what it has, told
        by `send_abort(server ids)`.

        Ends within ABORT_GRACE_S after the first `send_abort`: a server that does not answer by then loses
        the connection, and the tokens. Nobody is in flight any more even if it raises, which it does with the
        last EngineError of `send_abort`, if none after it went well.
        """
        for entry in self._in_flight.values():
            entry.aborted = True
        self.notify()
        names = self.sent()
        failure: EngineError | None = None
        with trio.move_on_after(ABORT_GRACE_S) as grace:
            while names:
                try:
                    await send_abort(list(names.values()))
                    failure = None
                except EngineError as error:
                    failure = error
                with trio.move_on_after(ABORT_AGAIN_S):
                    await self.wait_answered(names)
                names = {
                    name: server_id for name, server_id in names.items() if self.sent().get(name) == server_id
                }
        if grace.cancelled_caught:
            for name, server_id in names.items():
                if self.sent().get(name) == server_id:
                    self._in_flight[name].scope.cancel()
            await self.wait_answered(names)
        if failure is not None:
            raise failure

    async def cancel_all(self) -> None:
        """Answers everyone with nothing: for servers that cannot be told to abort. Their connections are
        closed.
        """
        names = self.sent()
        for entry in self._in_flight.values():
            entry.aborted = True
            if entry.asked:
                entry.scope.cancel()
        self.notify()
        await self.wait_answered(names)

    # --- life -----------------------------------------------------------------------------------------------

    def notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"{self.name} is closed; use it inside its `async with`")

    def close(self) -> None:
        """Whoever waits, and every later call, gets EngineClosed."""
        self._closed = True
        for entry in self._in_flight.values():
            entry.scope.cancel()
        self.notify()

    def statistics(self) -> dict[str, float]:
        asked = sum(entry.asked for entry in self._in_flight.values())
        counts = {
            "running": asked,
            "waiting": len(self._in_flight) - asked,
            "requests_finished": self._finished,
        }
        return {name: float(value) for name, value in counts.items()} | {
            f"http/{name}": value for name, value in self.client.statistics().items()
        }


async def ask_watched(
    ask: Callable[[], Awaitable[ResultT]],
    moves: Callable[[], Awaitable[bool]],
    *,
    silence_s: float,
    where: str,
) -> ResultT:
    """What `ask()` returns. Every `silence_s` a task beside it asks `moves()` whether the server still works;
    if not, `ask()` is cancelled. Raises what both raise, and EngineSilent.
    """
    results: list[ResultT] = []
    failure: EngineError | None = None

    async def watch() -> None:
        nonlocal failure
        try:
            while True:
                await trio.sleep(silence_s)
                if not await moves():
                    raise EngineSilent(f"{where}: no answer and no progress for {silence_s:g} s")
        except EngineError as error:
            failure = error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            results.append(await ask())
        except EngineError as error:
            failure = error
        nursery.cancel_scope.cancel()
    if results:
        return results[0]
    assert failure is not None
    raise failure


def check_status(reply: HttpReply, *, where: str) -> None:
    """Raises unless the status is 2xx: EngineOverloaded for 429 and 503, InfrastructureError for 5xx and 408,
    RequestRefused for other 4xx.

    401, 403, 404 and redirects are EngineError: they are about the server's address, key and version, and no
    other request will fare better.
    """
    if 200 <= reply.status < 300:
        return
    text = f"{where} gave {reply.status}: {show(reply.body)}"
    if reply.status in (429, 503):
        raise EngineOverloaded(text, retry_after_s=read_retry_after(reply.headers))
    if (
        reply.status >= 500 or reply.status == 408
    ):  # 408: it waited for the request in vain, and a proxy says so for its server
        raise InfrastructureError(text)
    if reply.status in (401, 403, 404) or reply.status < 400:
        raise EngineError(text)
    raise RequestRefused(text)


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header; None if there is none, or it is a date or no number."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdecimal() else None
