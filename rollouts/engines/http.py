"""HTTP/1.1 to one server, by httpx: a stock of clients with one connection each.

    request() ──► take the client used last, or make one ──► send, read whole ──► put it back on top
                                                             └ cancelled, failed: the client is closed

One shared client would search its whole pool at every request, and could lose the slot of a cancelled one.
There is no queue and no limit here: what limits requests is admission above.
"""

import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import trio

from rollouts.errors import EngineClosed, EngineSetupError, EngineSilent, EngineUnreachable, ReplyError
from rollouts.types import Texts, live

IDLE_S = 4.0  # uvicorn, below vLLM and SGLang, closes after 5 s
MAX_IDLE = 1024
MAX_BYTES = 1 << 28  # of an answer that says its length; one of 100,000 tokens has 10 MB
CONNECT_S = 5.0  # for a connection, TLS included
CLOSE_S = 1.0  # for a TLS goodbye
RESEND_S = 1.0  # a kept connection that the server had closed says so at once; later it may have done work
# scheme://name.of.host:port/prefix, or scheme://[IPv6]:port/prefix
URL = re.compile(
    r"https?://(\[[0-9a-f:.]+\]|[\w-]{1,63}(\.[\w-]{1,63})*\.?)(:(?P<port>\d{1,5}))?(/[!$->A-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody; a client without it costs 24 ms

Transport = Callable[[], httpx.AsyncBaseTransport]
"""How requests travel, in place of the network."""


@live
class HttpClient:
    """Requests to one server. Made by open_http_client."""

    url: str  # stands before every path, and in messages
    headers: Texts  # go into every request
    make: Callable[[], httpx.AsyncClient]
    _idle: deque[tuple[float, httpx.AsyncClient]] = field(
        default_factory=deque
    )  # idle since; the newest last
    _closed: bool = False

    async def request(
        self, method: str, path: str, *, body: bytes | None = None, silence_s: float = 60.0
    ) -> httpx.Response:
        """The server's whole answer, whatever its status; redirects are not followed. A body is sent as
        application/json.

        Cancelling closes the connection. The request is sent again once, over a new connection, when a kept
        one turns out within RESEND_S to be closed before the head of the answer. Raises: EngineUnreachable
        (refused, not connected in time, closed unanswered, or broken), ReplyError (an answer that is cut, not
        HTTP or longer than MAX_BYTES), EngineSilent (no byte moved for silence_s), EngineClosed.
        """
        begun_s = trio.current_time()
        try:
            if self._idle:  # httpx sees by itself when the connection is too old or over
                try:
                    return await self._ask(self._idle.pop()[1], method, path, body, silence_s)
                except _Unanswered:
                    if trio.current_time() - begun_s >= RESEND_S:
                        raise
            return await self._ask(self.make(), method, path, body, silence_s)
        except _Unanswered as error:  # the class is this module's own, and failures are counted by class
            raise EngineUnreachable(str(error)) from error.__cause__

    async def _ask(
        self, client: httpx.AsyncClient, method: str, path: str, body: bytes | None, silence_s: float
    ) -> httpx.Response:
        """The answer over this client's connection; the client is kept if all went well."""
        where = f"{method} {self.url}{path}"
        if self._closed:
            raise EngineClosed(f"{where}: the client is closed; use it inside its `async with`")
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S, pool=None).as_dict()
        headers, parts = dict(self.headers), [body] if body else []
        if method != "GET":
            headers |= {"content-length": str(len(body or b"")), "content-type": "application/json"}
        request = httpx.Request(
            method, self.url + path, headers=headers, stream=_Body(parts), extensions={"timeout": timeout}
        )
        reply, kept = None, False
        try:
            reply = await client.send(request, stream=True)
            if int(reply.headers.get("content-length", 0)) > MAX_BYTES:
                raise ReplyError(
                    f"{where}: the answer has more than MAX_BYTES={MAX_BYTES} bytes; ask for less"
                )
            await reply.aread()
            kept = not self._closed
        except (httpx.ConnectTimeout, httpx.ConnectError) as error:
            raise EngineUnreachable(
                f"{where}: no connection within {CONNECT_S:g} s: {_describe(error)}"
            ) from error
        except httpx.TimeoutException as error:
            raise EngineSilent(f"{where}: no byte moved for {silence_s:g} s") from error
        except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
            if "without sending a response" in str(error):
                raise _Unanswered(f"{where}: the server closed the connection without an answer") from error
            raise ReplyError(f"{where}: the answer is cut or not HTTP: {error}") from error
        except httpx.TransportError as error:
            kind = EngineUnreachable if reply else _Unanswered
            raise kind(f"{where}: the connection broke: {_describe(error)}") from error
        finally:
            if kept:
                self._idle.append((trio.current_time(), client))
            else:
                await _close(client)
        if kept and (len(self._idle) > MAX_IDLE or self._idle[0][0] < trio.current_time() - IDLE_S):
            await _close(self._idle.popleft()[1])  # one for each put back keeps up
        return reply

    async def aclose(self) -> None:
        """Closes every idle connection; every later request gets EngineClosed."""
        self._closed = True
        while self._idle:
            await _close(self._idle.pop()[1])


@dataclass
class _Body(httpx.AsyncByteStream):
    """A request's body. httpx's own is a generator, which a cancelled request leaves unfinished."""

    parts: list[bytes]

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self.parts:
            raise StopAsyncIteration
        return self.parts.pop()


class _Unanswered(EngineUnreachable):
    """The connection ended before the head of the answer."""


def _describe(error: BaseException) -> str:
    """What the first cause says, which httpx leaves out."""
    while cause := error.__cause__ or error.__context__:
        error = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
    return str(error) or type(error).__name__


async def _close(client: httpx.AsyncClient) -> None:
    with trio.move_on_after(CLOSE_S, shield=True):
        await client.aclose()


@asynccontextmanager
async def open_http_client(
    url: str, *, api_key: str | None = None, transport: Transport | None = None
) -> AsyncIterator[HttpClient]:
    """A client for the server at `url`, http or https, with or without a path before all others. Connects
    when it is first asked to.

    `api_key` goes into every request and into no message. Raises EngineSetupError for a url or a key that
    cannot be used, and shows no query and no password of a url: either may be a key.
    """
    found = URL.fullmatch(url)
    if not found or not 0 < int(found["port"] or 80) < 1 << 16:
        shown = re.split("[?#]", url.rpartition("@")[2])[0]
        raise EngineSetupError(
            f"url={shown!r} is not http(s)://host[:port][/prefix]; it may have no query and no password, and"
            " the key goes into api_key"
        )
    parts = urlsplit(url)
    context = ssl.create_default_context() if parts.scheme == "https" else _NO_TLS
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)
    headers = {"host": parts.netloc, "accept-encoding": "identity"}
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
            raise EngineSetupError(
                f"the api_key for {url} is empty or holds a character that no header may carry (a line"
                " break?)"
            )
        headers["authorization"] = f"Bearer {api_key}"

    def make() -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=context, limits=limits, transport=transport and transport(), trust_env=False
        )

    client = HttpClient(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", headers, make)
    try:
        yield client
    finally:
        await client.aclose()
