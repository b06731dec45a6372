"""HTTP/1.1 to one server, by httpx: a stock of clients with one connection each.

    request() ──► take the client used last, or make one ──► send, read whole ──► put it back on top
                                                             └ cancelled, failed: the client is closed

One shared client would search its whole pool at every request, and could lose the slot of a cancelled one.
There is no queue and no limit here: what limits requests is admission above.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx
import trio

from rollouts.errors import EngineClosed, EngineSetupError, EngineSilent, EngineUnreachable, ReplyError

IDLE_S = 4.0  # uvicorn, below vLLM and SGLang, closes after 5 s
MAX_IDLE = 1024
MAX_BODY_BYTES = 1 << 28
CLOSE_S = 1.0  # for a TLS goodbye
RESEND_S = 1.0  # a kept connection that the server had closed says so at once; later it may have done work


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole answer, whatever its status."""

    status: int
    headers: Mapping[str, str]  # names in lower case; values of a repeated one joined by ", "
    body: bytes


class HttpClient:
    """Requests to one server. Made by open_http_client."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        make: Callable[[], httpx.AsyncClient],
        *,
        connect_s: float,
        max_body_bytes: int,
    ) -> None:
        """`url` stands before every path, and in messages; `headers` go into every request."""
        self.url = url
        self._headers = dict(headers)
        self._make = make
        self._connect_s = connect_s
        self._max_body_bytes = max_body_bytes
        self._idle: deque[tuple[float, httpx.AsyncClient]] = deque()  # idle since; the newest last
        self._in_flight: set[trio.CancelScope] = set()
        self._made = 0
        self._closed = False

    async def request(
        self, method: str, path: str, *, body: bytes | None = None, silence_s: float = 60.0
    ) -> HttpReply:
        """The server's answer, whatever its status; redirects are not followed. A body is sent as
        application/json.

        Cancelling closes the connection. The request is sent again once, over a new connection, when a kept
        one turns out within RESEND_S to be closed before the head of the answer.

        Raises: EngineUnreachable (refused, not connected in time, closed unanswered, or broken), ReplyError
        (an answer that is cut, is not HTTP, or is larger than max_body_bytes), EngineSilent (no byte moved
        for silence_s), EngineClosed.
        """
        assert path.startswith("/"), path
        where = f"{method} {self.url}{path}"
        if self._closed:
            raise EngineClosed(f"{where}: the client is closed; use it inside its `async with`")
        with trio.CancelScope() as scope:
            self._in_flight.add(scope)
            try:
                client, begun_s = self._take(), trio.current_time()
                try:
                    return await self._ask(client or self._new(), method, path, body, silence_s)
                except EngineUnreachable as error:
                    unanswered = isinstance(error, _Unanswered)
                    if client is None or not unanswered or trio.current_time() - begun_s >= RESEND_S:
                        raise
                return await self._ask(self._new(), method, path, body, silence_s)
            finally:
                self._in_flight.discard(scope)
        raise EngineClosed(f"{where}: the client was closed before the answer was whole")

    async def _ask(
        self, client: httpx.AsyncClient, method: str, path: str, body: bytes | None, silence_s: float
    ) -> HttpReply:
        """The answer over this client's connection; the client is kept if all went well."""
        where = f"{method} {self.url}{path}"
        timeout = httpx.Timeout(silence_s, connect=self._connect_s, pool=None).as_dict()
        headers = dict(self._headers)
        if method != "GET":
            headers["content-length"] = str(len(body or b""))
        if body is not None:
            headers["content-type"] = "application/json"
        request = httpx.Request(
            method, self.url + path, headers=headers, stream=_Body(body), extensions={"timeout": timeout}
        )
        answered = kept = False
        try:
            reply = await client.send(request, stream=True)
            answered = True
            content = await self._read(reply, where)
            kept = True
        except httpx.ConnectTimeout as error:
            raise EngineUnreachable(f"{where}: no connection within {self._connect_s:g} s") from error
        except httpx.ConnectError as error:
            raise EngineUnreachable(f"{where}: no connection: {_describe(error)}") from error
        except httpx.TimeoutException as error:
            raise EngineSilent(f"{where}: no byte moved for {silence_s:g} s") from error
        except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
            if "without sending a response" in str(error):
                raise _Unanswered(f"{where}: the server closed the connection without an answer") from error
            raise ReplyError(f"{where}: the answer is cut or not HTTP: {error}") from error
        except httpx.TransportError as error:
            kind = EngineUnreachable if answered else _Unanswered
            raise kind(f"{where}: the connection broke: {_describe(error)}") from error
        finally:
            if kept and not self._closed:
                await self._put_back(client)
            else:
                await _close(client)
        return HttpReply(reply.status_code, reply.headers, content)

    async def _read(self, reply: httpx.Response, where: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        with trio.CancelScope() as scope:  # which ends httpx's generators where they wait
            async for part in reply.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > self._max_body_bytes:
                    scope.cancel()
        if size > self._max_body_bytes:
            raise ReplyError(f"{where}: the answer is larger than max_body_bytes={self._max_body_bytes}")
        return b"".join(parts)

    def _new(self) -> httpx.AsyncClient:
        self._made += 1
        return self._make()

    def _take(self) -> httpx.AsyncClient | None:
        """The client used last; httpx sees by itself when its connection is too old or over."""
        return self._idle.pop()[1] if self._idle else None

    async def _put_back(self, client: httpx.AsyncClient) -> None:
        now = trio.current_time()
        self._idle.append((now, client))
        since, oldest = self._idle[0]
        if len(self._idle) > MAX_IDLE or since < now - IDLE_S:  # one for each put back keeps up
            self._idle.popleft()
            await _close(oldest)

    async def aclose(self) -> None:
        """Closes every connection. Who waits for an answer gets EngineClosed, and so does every later
        request.
        """
        self._closed = True
        for scope in self._in_flight:
            scope.cancel()
        while self._idle:
            await _close(self._idle.pop()[1])

    def statistics(self) -> dict[str, float]:
        """connections in use or idle, how many of them idle, and how many were ever opened."""
        connections = len(self._in_flight) + len(self._idle)
        counts = {"connections": connections, "idle": len(self._idle), "opened": self._made}
        return {name: float(count) for name, count in counts.items()}


class _Body(httpx.AsyncByteStream):
    """A request's body. httpx's own is a generator, which a cancelled request leaves unfinished."""

    def __init__(self, body: bytes | None) -> None:
        self._parts = [body] if body else []

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._parts:
            raise StopAsyncIteration
        return self._parts.pop()


class _Unanswered(EngineUnreachable):
    """The connection ended before the head of the answer."""


def _describe(error: BaseException) -> str:
    """The message of the first cause, which httpx leaves out."""
    text = str(error) or type(error).__name__
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
        text = str(error) or text
    return text


async def _close(client: httpx.AsyncClient) -> None:
    with trio.move_on_after(CLOSE_S, shield=True):
        await client.aclose()


@asynccontextmanager
async def open_http_client(
    url: str,
    *,
    api_key: str | None = None,
    connect_s: float = 5.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    ssl_context: ssl.SSLContext | None = None,
    transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
) -> AsyncIterator[HttpClient]:
    """A client for the server at `url`, http or https, with or without a path before all others. Connects
    when it is first asked to.

    `api_key` goes into every request and into no message. `connect_s`: seconds that a connection, TLS
    included, may take. `transport` replaces the network, for tests. Raises EngineSetupError for a url or a
    key that cannot be used.
    """
    parts = split_url(url)
    check_key(api_key, where=url)
    context = ssl_context or (ssl.create_default_context() if parts.scheme == "https" else _NO_TLS)
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)
    headers = {"host": parts.netloc, "accept-encoding": "identity"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"

    def make() -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=context, limits=limits, transport=transport() if transport else None, trust_env=False
        )

    shown = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    client = HttpClient(shown, headers, make, connect_s=connect_s, max_body_bytes=max_body_bytes)
    try:
        yield client
    finally:
        await client.aclose()


_NO_TLS = ssl.SSLContext(
    ssl.PROTOCOL_TLS_CLIENT
)  # trusts nobody; made once, for a client costs 24 ms without


def split_url(url: str) -> SplitResult:
    """The parts of a server's url. Raises EngineSetupError, which shows no query and no password: either may
    be a key.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # what connecting does: it refuses empty and endless labels
    except ValueError:  # UnicodeError is one
        parts, host, port = None, "", 0
    if "@" in url:
        raise EngineSetupError(
            f"the url of {host or 'a server'} carries a user name or password; give the key as api_key"
        )
    fits = parts is not None and parts.scheme in ("http", "https") and host and port != 0
    plain = url.isascii() and url.isprintable() and not any(character in url for character in "?# ")
    if parts is None or not fits or not plain:
        shown = url.split("?")[0].split("#")[0]
        raise EngineSetupError(
            f"url={shown!r} is not http(s)://host[:port][/prefix]; it may have no query, and the key goes"
            " into api_key"
        )
    return parts


def check_key(key: str | None, *, where: str, name: str = "api_key") -> None:
    """Raises EngineSetupError, without showing it, for a key that no header can carry."""
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() != ""):
        raise EngineSetupError(
            f"the {name} for {where} is empty or holds a character that no header may carry (a line break?)"
        )
