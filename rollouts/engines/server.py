"""What every HTTP engine does on this side of the wire: who may be asked, who is in flight, what a status means, when silence is a failure.

    generate() ──► check ──► gate ──► ask(request, server_id) ──► Completion
                   refuses    closed between pause() and resume()
                              abort_all(): whoever waits here is answered at once, with nothing

A server is asked under ids of our own making: fixed-width hex, because SGLang aborts every id that begins with the one it is given.
What would kill a server (an id outside the vocabulary) or be refused by it (a prompt too long) never leaves this process.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import trio

from rollouts.engines.http import HttpReply
from rollouts.engines.wire import show
from rollouts.errors import EngineClosed, EngineError, EngineOverloaded, EngineSilent, InfrastructureError, RequestRefused
from rollouts.types import Completion, EngineFeatures, GenerateRequest

ABORT_GRACE_S = 5.0  # for a server to answer what it was told to abort; after it the connection is closed, which aborts too
ABORT_AGAIN_S = 1.0  # an abort that overtook its request on the way names nobody; it is said again
Ask = Callable[[GenerateRequest, str], Awaitable[Completion]]
"""Sends one request under a server-side id and gives its completion. Raises RequestRefused and InfrastructureError."""


class Client(Protocol):
    """What HttpClient does."""

    async def request(
        self, method: str, path: str, *, body: bytes | None = None, silence_s: float = ..., on_silence: Callable[[], Awaitable[bool]] | None = None
    ) -> HttpReply: ...
    def statistics(self) -> Mapping[str, float]: ...


@dataclass(slots=True, eq=False)
class _InFlight:
    request: GenerateRequest
    server_id: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    asked: bool = False  # past the gate
    aborted: bool = False


class EngineServer:
    """One server as its engine sees it. Used by VLLMEngine and SGLangEngine; lives as long as its HTTP client."""

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
        self._finished = 0

    # --- calls ---------------------------------------------------------------------------------------------------------------

    async def call(
        self, method: str, path: str, body: Any = None, *, silence_s: float | None = None, on_silence: Callable[[], Awaitable[bool]] | None = None
    ) -> bytes:
        """The body of a 2xx answer. `body` is sent as JSON. Raises what `check_status` raises, EngineUnreachable, EngineSilent, ReplyError."""
        self.check_open()
        sent = None if body is None else msgspec.json.encode(body)
        reply = await self.client.request(method, path, body=sent, silence_s=silence_s or self.silence_s, on_silence=on_silence)
        check_status(reply, where=f"{self.name}: {method} {path}")
        return reply.body

    async def call_generate(self, path: str, body: Any, read_progress: Callable[[], Awaitable[Hashable]]) -> bytes:
        """The answer to a generate call, awaited for as long as the server makes progress or is paused by us."""
        return await self.call("POST", path, body, on_silence=lambda: self._moved(read_progress))

    async def _moved(self, read_progress: Callable[[], Awaitable[Hashable]]) -> bool:
        """Whether the server did any work since it was last asked; asked once for all who wait. A frozen server need not."""
        if self._frozen:
            return True
        now, last = trio.current_time(), self._progress
        if last is not None and now - last[0] < self.silence_s / 2:
            return True
        self._progress = (now, None)  # whoever comes while we ask waits another round
        try:
            value = await read_progress()
        except InfrastructureError as error:
            raise EngineSilent(f"{self.name} sent nothing for {self.silence_s:g} s and does not say how far it is: {error}") from error
        self._progress = (now, value)
        return last is None or last[1] is None or value != last[1]

    # --- requests ------------------------------------------------------------------------------------------------------------

    async def run(self, request: GenerateRequest, features: EngineFeatures, ask: Ask) -> Completion:
        """`ask`, when the gate is open. Raises RequestRefused before anything is sent, EngineClosed, and what `ask` raises."""
        self.check_open()
        check_request(request, features)
        if request.request_id in self._in_flight:
            raise RequestRefused(f"request {request.request_id!r} is in flight on {features.name} already; ids must be unique")
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
        return _nothing(request)

    async def _pass_gate(self, entry: _InFlight) -> None:
        while self._paused and not entry.aborted and not self._closed:
            await self._changed.wait()
        self.check_open()
        entry.asked = True

    def close_gate(self, *, frozen: bool = True) -> None:
        """New requests wait from now on. `frozen`: those at the server stand still too, so that its silence says nothing."""
        self._paused = True
        self._frozen = frozen
        self._progress = None

    def open_gate(self) -> None:
        self._paused = False
        self._frozen = False
        self._progress = None  # what stood still while it was paused may begin anew
        self.notify()

    @property
    def paused(self) -> bool:
        return self._paused

    def sent(self) -> dict[str, str]:
        """Request ids that the server has, or will have in a moment, with its names for them."""
        return {name: entry.server_id for name, entry in self._in_flight.items() if entry.asked}

    async def wait_answered(self, names: Mapping[str, str]) -> None:
        """Returns when none of `names`, from sent(), is in flight any more."""
        while any(name in self._in_flight and self._in_flight[name].server_id == server_id for name, server_id in names.items()):
            await self._changed.wait()

    async def abort(self, send_abort: Callable[[list[str]], Awaitable[None]]) -> None:
        """Answers everyone: who waits at the gate with nothing, who is at the server with what it has, told by `send_abort(server ids)`.

        Ends within ABORT_GRACE_S after the first `send_abort`: a server that does not answer by then loses the connection, and the tokens.
        """
        for entry in self._in_flight.values():
            entry.aborted = True
        self.notify()
        names = self.sent()
        with trio.move_on_after(ABORT_GRACE_S) as grace:
            while names:
                await send_abort(list(names.values()))
                with trio.move_on_after(ABORT_AGAIN_S):
                    await self.wait_answered(names)
                names = {name: server_id for name, server_id in names.items() if self.sent().get(name) == server_id}
        if grace.cancelled_caught:
            for name, server_id in names.items():
                if self.sent().get(name) == server_id:
                    self._in_flight[name].scope.cancel()
            await self.wait_answered(names)

    async def cancel_all(self) -> None:
        """Answers everyone with nothing: for servers that cannot be told to abort. Their connections are closed."""
        names = self.sent()
        for entry in self._in_flight.values():
            entry.aborted = True
            if entry.asked:
                entry.scope.cancel()
        self.notify()
        await self.wait_answered(names)

    # --- life ----------------------------------------------------------------------------------------------------------------

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
        counts = {"running": asked, "waiting": len(self._in_flight) - asked, "requests_finished": self._finished}
        return {name: float(value) for name, value in counts.items()} | {f"http/{name}": value for name, value in self.client.statistics().items()}


def check_request(request: GenerateRequest, features: EngineFeatures) -> None:
    """Raises RequestRefused, naming request and rule, for what this engine cannot do or what would take its server down."""
    who, sampling = f"request {request.request_id!r} to {features.name}", request.sampling
    if not len(request.prompt_ids):
        raise RequestRefused(f"{who}: the prompt is empty; give at least one token")
    total = len(request.prompt_ids) + sampling.max_new_tokens
    if total > features.context_length:
        raise RequestRefused(
            f"{who}: {len(request.prompt_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} make {total}; "
            f"the context holds {features.context_length}"
        )
    outside = (request.prompt_ids < 0) | (request.prompt_ids >= features.vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise RequestRefused(f"{who}: prompt token {at} has id {request.prompt_ids[at]}; the vocabulary has {features.vocab_size} ids")


def check_status(reply: HttpReply, *, where: str) -> None:
    """Raises unless the status is 2xx: EngineOverloaded for 429 and 503, InfrastructureError for 5xx, RequestRefused for other 4xx.

    401, 403 and 404 are EngineError: they are about the server's key and version, and no other request will fare better.
    """
    if 200 <= reply.status < 300:
        return
    text = f"{where} gave {reply.status}: {show(reply.body)}"
    if reply.status in (429, 503):
        raise EngineOverloaded(text, retry_after_s=read_retry_after(reply.headers))
    if reply.status >= 500:
        raise InfrastructureError(text)
    if reply.status in (401, 403, 404):
        raise EngineError(text)
    raise RequestRefused(text)


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header; None if there is none, or it is a date or no number."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdecimal() else None


def _nothing(request: GenerateRequest) -> Completion:
    none = np.zeros(0, np.int64)
    return Completion(
        request_id=request.request_id, token_ids=none, log_probs=np.zeros(0, np.float32), weight_versions=none, finish_reason="abort"
    )
